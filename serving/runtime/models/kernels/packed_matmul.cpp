// Products of a few tokens with a fixed weight: every weight is read from memory once, for all tokens, as fast as it comes.
//
// A weight [out, in] lies in blocks of 32 outputs (packed_matmul.py). Of a block, two inputs of all 32 outputs follow each other: two
// vectors. Each vector is multiplied with the same two inputs of up to MOST tokens, whose sums stay in registers. All sums are float32 and
// run over the inputs in one order, so a token's result does not depend on how many others there are.

#include <array>
#include <cstdint>
#include <utility>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace draftwell {

constexpr int LANES = 16;        // outputs in a vector
constexpr int VECTORS = 2;       // in a block
constexpr int MOST = 12;         // tokens whose 2 * 12 sums, two vectors of weights and one of inputs fill 27 of 32 registers
constexpr int64_t AHEAD = 2048;  // bytes between what is multiplied and what is fetched: 1024 to 4096 were alike

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Pairs __attribute__((vector_size(64)));    // two bfloat16 each, the first in the lower half

// Two inputs' weights of sixteen outputs.
static inline Pairs load(const uint16_t* weight) {
    Pairs pairs;
    __builtin_memcpy(&pairs, weight, sizeof pairs);
    return pairs;
}

static inline Floats floats(const int8_t* whole) {
    Floats out;
#if defined(__AVX512F__)
    out = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)whole)));
#elif defined(__AVX2__)
    for (int half = 0; half < 2; half++) {
        __m256 eight = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(whole + 8 * half))));
        __builtin_memcpy((float*)&out + 8 * half, &eight, sizeof eight);
    }
#else
    for (int lane = 0; lane < LANES; lane++) out[lane] = whole[lane];
#endif
    return out;
}

// The same of int8, where sixteen weights of the first input come before sixteen of the second. Whole numbers up to 127 are exact bfloat16.
static inline Pairs load(const int8_t* weight) {
    return ((Pairs)floats(weight) >> 16) | (Pairs)floats(weight + LANES);
}

static inline Floats plus_product(Floats sum, Pairs weights, uint32_t inputs) {
    Pairs both = Pairs{} + inputs;
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)both);
#else
    sum += (Floats)(weights << 16) * (Floats)(both << 16);
    return sum + (Floats)(weights & 0xffff0000u) * (Floats)(both & 0xffff0000u);
#endif
}

// `tokens` tokens × one block. x: pairs of inputs, `pairs` a token. out: `outputs` a token.
template <int tokens, typename Weight>
static void block(const uint32_t* x, const Weight* weight, float* out, int64_t pairs, int64_t outputs) {
    Floats sums[tokens][VECTORS] = {};
    for (int64_t pair = 0; pair < pairs; pair++, weight += VECTORS * LANES * 2) {
        for (int64_t byte = 0; byte < VECTORS * LANES * 2 * (int64_t)sizeof(Weight); byte += 64)
            __builtin_prefetch((const char*)weight + AHEAD + byte);
        Pairs first = load(weight), second = load(weight + LANES * 2);
#pragma GCC unroll 12
        for (int token = 0; token < tokens; token++) {
            sums[token][0] = plus_product(sums[token][0], first, x[token * pairs + pair]);
            sums[token][1] = plus_product(sums[token][1], second, x[token * pairs + pair]);
        }
    }
#pragma GCC unroll 12
    for (int token = 0; token < tokens; token++) __builtin_memcpy(out + token * outputs, sums[token], sizeof sums[token]);
}

// `block` by the number of tokens, less one.
template <typename Weight, int... less>
static constexpr auto blocks(std::integer_sequence<int, less...>) {
    return std::array{block<less + 1, Weight>...};
}

// x [tokens, 2 * pairs] bfloat16 → out [tokens, outputs] float32.
template <typename Weight>
static void matmul(const uint32_t* x, const Weight* weight, float* out, int64_t tokens, int64_t pairs, int64_t outputs) {
    static constexpr auto by_tokens = blocks<Weight>(std::make_integer_sequence<int, MOST>());
    const int64_t width = VECTORS * LANES, parts = (tokens + MOST - 1) / MOST;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < outputs / width; at++)
        for (int64_t part = 0; part < parts; part++) {  // the block's weights come from the cache after the first
            const int64_t start = tokens * part / parts, end = tokens * (part + 1) / parts;
            by_tokens[end - start - 1](x + start * pairs, weight + at * width * pairs * 2, out + start * outputs + at * width, pairs, outputs);
        }
}

}  // namespace draftwell
