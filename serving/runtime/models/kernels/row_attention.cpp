// Attention of a few tokens over the keys and values of one slot, which are read once for all of them.
//
// The keys of some positions, and their values, are brought into the layout of a weight (packed_matmul.cpp): scores and sums are its
// products. Positions are cut into chunks that do not depend on the number of threads; each chunk has a softmax of its own, and those of a
// query are merged in the end. To be compiled after packed_matmul.cpp.

#ifndef DRAFTWELL_ROW_ATTENTION
#define DRAFTWELL_ROW_ATTENTION

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#pragma GCC push_options
#pragma GCC optimize("O2")

namespace draftwell {

constexpr int64_t CHUNK = 128;  // positions; a multiple of the outputs of a block
constexpr int64_t WIDTH = VECTORS * LANES;

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct Row {
    const float* query;      // [tokens, heads, dim]
    const uint16_t *keys, *values;  // [kv_heads, positions, dim], bfloat16
    const uint16_t* mask;    // [tokens, end] bfloat16, 0 or -inf
    int64_t tokens, heads, kv_heads, dim, end;
    int64_t head_stride;     // of keys and values
    float scale, softcap;    // no softcap: 0
};

INLINE float as_float(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
}

INLINE Floats floats_from(const float* from) {
    Floats out;
    __builtin_memcpy(&out, from, sizeof out);
    return out;
}

// Of numbers up to 0, within 2e-7 of their exponential; 0 below -87.
INLINE Floats exponential(Floats given) {
    const Floats least = Floats{} - 87.0f, x = given > least ? given : least;
    const Ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
    const Floats whole = __builtin_convertvector(power, Floats);
    const Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats sum = rest * (1.0f / 720) + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    return (Floats)(((Ints)sum + (power << 23)) & (given > least));
}

// float32 [count], a multiple of LANES, as inputs of `block`.
INLINE void to_inputs(const float* from, int64_t count, Input* to) {
#ifdef __AVX512BF16__
    for (int64_t i = 0; i < count; i += LANES) {
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)floats_from(from + i));
        __builtin_memcpy((uint16_t*)to + i, &rounded, sizeof rounded);
    }
#else
    __builtin_memcpy(to, from, count * sizeof(float));
#endif
}

#ifdef __AVX512F__
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
#ifdef __clang__
#define INTERLEAVED(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define INTERLEAVED(first, second, ...) __builtin_shuffle(first, second, (Ints){__VA_ARGS__})
#endif

// LANES vectors, of which number i becomes what was in lane i of each.
INLINE void transpose(Pairs (&rows)[LANES]) {
#pragma GCC unroll 4
    for (int stage = 1; stage < LANES; stage *= 2) {
        Pairs next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = INTERLEAVED(rows[i], rows[i + LANES / 2], LOW);
            next[2 * i + 1] = INTERLEAVED(rows[i], rows[i + LANES / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

// Keys [count, dim] → blocks of a weight [width outputs, dim inputs]; outputs from `count` on are 0. Fetches `soon`, as many.
INLINE void pack_keys(const uint16_t* keys, int64_t count, int64_t width, int64_t dim, uint16_t* to, const uint16_t* soon) {
    for (int64_t from = 0; from < width; from += LANES)
        for (int64_t at = 0; at < dim; at += 2 * LANES) {
            Pairs rows[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                __builtin_prefetch(soon + (from + i) * dim + at);
                rows[i] = from + i < count ? pairs_at(keys + (from + i) * dim + at) : Pairs{};
            }
            transpose(rows);
            uint16_t* into = to + from / WIDTH * WIDTH * dim + from % WIDTH * 2;
            for (int64_t i = 0; i < LANES; i++) __builtin_memcpy(into + (at / 2 + i) * WIDTH * 2, &rows[i], sizeof rows[i]);
        }
}

// Values [count, dim] → blocks of a weight [dim outputs, width inputs]; inputs from `count` on are 0. Fetches `soon`, as many.
INLINE void pack_values(const uint16_t* values, int64_t count, int64_t width, int64_t dim, uint16_t* to, const uint16_t* soon) {
    for (int64_t position = 0; position < width; position += 2)
        for (int64_t at = 0; at < dim; at += LANES) {
            __builtin_prefetch(soon + position * dim + at);
            __builtin_prefetch(soon + (position + 1) * dim + at);
            Halves first = {}, second = {};
            if (position < count) __builtin_memcpy(&first, values + position * dim + at, sizeof first);
            if (position + 1 < count) __builtin_memcpy(&second, values + (position + 1) * dim + at, sizeof second);
            const Pairs both = __builtin_convertvector(first, Pairs) | __builtin_convertvector(second, Pairs) << 16;
            __builtin_memcpy(to + at / WIDTH * WIDTH * width + position * WIDTH + at % WIDTH * 2, &both, sizeof both);
        }
}

// Scores [width] of a query → their exponentials less the largest, 0 from `count` on; that largest, and the exponentials' sum.
INLINE std::pair<float, float> softmax(const Row& row, float* scores, const uint16_t* mask, int64_t count, int64_t width) {
    const float none = -std::numeric_limits<float>::infinity();
    Floats most = Floats{} + none, sum = {};
    for (int64_t from = 0; from < width; from += LANES) {
        Halves masked;
        if (from + LANES <= count) {
            __builtin_memcpy(&masked, mask + from, sizeof masked);
        } else {  // apart, because what is written in parts cannot be read at once without waiting
            masked = Halves{} + 0xff80;  // -inf
            __builtin_memcpy(&masked, mask + from, std::max<int64_t>(count - from, 0) * sizeof *mask);
        }
        Floats some = floats_from(scores + from) * row.scale;
        if (row.softcap)
            for (int lane = 0; lane < LANES; lane++) some[lane] = row.softcap * std::tanh(some[lane] / row.softcap);
        some += (Floats)(__builtin_convertvector(masked, Pairs) << 16);
        most = some > most ? some : most;
        __builtin_memcpy(scores + from, &some, sizeof some);
    }
    float largest = none, total = 0;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    for (int64_t from = 0; from < width; from += LANES) {
        const Floats weights = largest == none ? Floats{} : exponential(floats_from(scores + from) - largest);
        __builtin_memcpy(scores + from, &weights, sizeof weights);
        sum += weights;
    }
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return {largest, total};
}

// What the queries of one key head find in the positions of a chunk.
struct Share {
    float *most, *sum, *out;  // [queries], [queries], [queries, dim]
};

static Share share_at(float* memory, int64_t number, int64_t queries, int64_t dim) {
    float* from = memory + number * queries * (dim + 2);
    return {from, from + queries, from + 2 * queries};
}

static void attend_chunk(const Row& row, int64_t head, int64_t from, Share part) {
    const int64_t count = std::min(CHUNK, row.end - from), width = (count + WIDTH - 1) / WIDTH * WIDTH;
    const int64_t groups = row.heads / row.kv_heads, queries = row.tokens * groups, dim = row.dim;
    static thread_local std::vector<uint16_t> weight;
    static thread_local std::vector<float> scores;
    static thread_local std::vector<Input> inputs;
    weight.resize(CHUNK * dim), scores.resize(queries * CHUNK), inputs.resize(queries * std::max(dim, CHUNK) / AT_ONCE);

    for (int64_t token = 0; token < row.tokens; token++)
        to_inputs(row.query + (token * row.heads + head * groups) * dim, groups * dim, inputs.data() + token * groups * dim / AT_ONCE);
    const uint16_t *keys = row.keys + head * row.head_stride + from * dim, *values = row.values + head * row.head_stride + from * dim;
    pack_keys(keys, count, width, dim, weight.data(), values);
    for (int64_t at = 0; at < width; at += WIDTH)
        block_by_parts(inputs.data(), weight.data() + at * dim, scores.data() + at, queries, dim / AT_ONCE, width);
    for (int64_t query = 0; query < queries; query++)
        std::tie(part.most[query], part.sum[query]) =
            softmax(row, scores.data() + query * width, row.mask + query / groups * row.end + from, count, width);

    to_inputs(scores.data(), queries * width, inputs.data());
    pack_values(values, count, width, dim, weight.data(), keys + CHUNK * dim);  // most likely this thread's next
    for (int64_t at = 0; at < dim; at += WIDTH)
        block_by_parts(inputs.data(), weight.data() + at * width, part.out + at, queries, width / AT_ONCE, dim);
}

// → out [tokens, heads, dim] float32.
static void row_attention(const Row& row, float* out) {
    const int64_t chunks = (row.end + CHUNK - 1) / CHUNK, groups = row.heads / row.kv_heads, queries = row.tokens * groups, dim = row.dim;
    static thread_local std::vector<float> kept;
    kept.resize(row.kv_heads * chunks * queries * (dim + 2));
    float* memory = kept.data();
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < row.kv_heads * chunks; item++)
            attend_chunk(row, item / chunks, item % chunks * CHUNK, share_at(memory, item, queries, dim));
        // a query's parts → their mean by the weight that each has beside the largest score of all
#pragma omp for schedule(static)
        for (int64_t item = 0; item < row.tokens * row.heads; item++) {
            const int64_t head = item % row.heads, query = item / row.heads * groups + head % groups;
            float largest = -std::numeric_limits<float>::infinity(), total = 0, *own = out + item * dim;
            for (int64_t chunk = 0; chunk < chunks; chunk++)
                largest = std::max(largest, share_at(memory, head / groups * chunks + chunk, queries, dim).most[query]);
            std::fill(own, own + dim, 0.0f);
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                const Share part = share_at(memory, head / groups * chunks + chunk, queries, dim);
                const float weight = std::exp(part.most[query] - largest);
                total += weight * part.sum[query];
                for (int64_t i = 0; i < dim; i++) own[i] += weight * part.out[query * dim + i];
            }
            for (int64_t i = 0; i < dim; i++) own[i] /= total;
        }
    }
    give_back_if_large(kept);
}

}  // namespace draftwell

#pragma GCC pop_options

#endif
