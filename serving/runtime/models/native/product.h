// Products of any number of tokens with a fixed weight: a weight is read from memory once for all tokens.
//
// A weight [out, in] lies in blocks of two vectors of outputs (packing.py). Of a block, two inputs of all its outputs follow each other.
// Each vector is multiplied with the same inputs of up to MOST tokens, whose sums stay in registers. A sum is float32 and runs over the
// inputs in one order, so a token's result does not depend on how many others there are. Where the processor has AMX, all that is not
// float32 is multiplied by tiles, one token or many: they add in an order of their own. Weights of 12, 8 or 4 bits are brought to bfloat16 for
// them, a step of 32 inputs at a time, while the next ones are fetched.

#ifndef DRAFTWELL_PRODUCT
#define DRAFTWELL_PRODUCT

#include "tiles.h"
#include "twelve_bits.h"
#include "vectors.h"

namespace draftwell {

#ifdef __AVX512F__
constexpr int MOST = 12;         // tokens whose 2 * 12 sums, two vectors of weights and one of inputs fill 27 of 32 registers
#else
constexpr int MOST = 6;          // 15 of 16 registers
#endif
constexpr int64_t AHEAD = 2048;  // bytes between what is multiplied and what is fetched
constexpr int64_t GROUP = 32;    // inputs of a step; in int4 they share a scale and a zero
constexpr int64_t STEP = GROUP * WIDTH;  // weights of a step of a block
constexpr int64_t ROOM = STEP * 2;       // bytes of a step in bfloat16
constexpr int64_t FAR = 4;               // steps between what is unpacked for tiles and what is fetched

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8, INT4, BFLOAT12 };

struct Weight {
    const char* data;
    const float *scale, *bias;  // [out] or none; the scale of int8
    int64_t given;              // inputs that a token has; the others are 0
    int64_t inputs, outputs;    // filled up
    int64_t kind;
    const uint8_t* table;        // [16], of bfloat12 as twelve_bits.h has it
    const Patch* patches;        // ascending
    const int64_t* first_patch;  // of each block, and where they end
};

// What tokens are multiplied as: one float32, or two bfloat16 where there is an instruction for them.
#ifdef __AVX512BF16__
typedef uint32_t Both;
constexpr int AT_ONCE = 2;
INLINE Floats plus_product(Floats sum, Pairs weights, Both both) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)(Pairs{} + both));
}
#else
typedef float Both;
constexpr int AT_ONCE = 1;
#endif
INLINE Floats plus_product(Floats sum, Floats weights, float input) { return fused(weights, all(input), sum); }

INLINE Floats whole_at(const int8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    Floats out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = from[lane];
    return out;
#endif
}

INLINE Ints bytes_at(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    Ints out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = from[lane];
    return out;
#endif
}

// Two inputs of a vector of outputs as they are multiplied at once.
INLINE Pairs as_pairs(Floats first, Floats second) {
    return ((Pairs)first + 0x8000u) >> 16 | (((Pairs)second + 0x8000u) & 0xffff0000u);
}

// Readers of a block: `begin` a pair of inputs, then `get` the weights of a vector of outputs.
struct Float32 {
    typedef float Input;
    typedef Floats Weights;
    static constexpr int STEPS = 2;
    static constexpr int64_t PAIR = 2 * WIDTH * 4, HEADER = 0;
    INLINE void header(const char*, Floats (&)[VECTORS], Floats (&)[VECTORS]) {}
    INLINE Weights get(const char* at, int vector, int step, const Floats (&)[VECTORS], const Floats (&)[VECTORS]) {
        return floats_at((const float*)at + step * WIDTH + vector * LANES);
    }
};

struct Bfloat16 {
    typedef Both Input;
    static constexpr int STEPS = 2 / AT_ONCE;
    static constexpr int64_t PAIR = 2 * WIDTH * 2, HEADER = 0;
    INLINE void header(const char*, Floats (&)[VECTORS], Floats (&)[VECTORS]) {}
#ifdef __AVX512BF16__
    typedef Pairs Weights;
    INLINE Weights get(const char* at, int vector, int, const Floats (&)[VECTORS], const Floats (&)[VECTORS]) {
        return read<Pairs>(at + vector * LANES * 4);
    }
#else
    typedef Floats Weights;
    INLINE Weights get(const char* at, int vector, int step, const Floats (&)[VECTORS], const Floats (&)[VECTORS]) {
        const Pairs pairs = read<Pairs>(at + vector * LANES * 4);
        return (Floats)(step ? pairs & 0xffff0000u : pairs << 16);
    }
#endif
};

struct Int8 {
    typedef Both Input;
    static constexpr int STEPS = 2 / AT_ONCE;
    static constexpr int64_t PAIR = 2 * WIDTH, HEADER = 0;
    INLINE void header(const char*, Floats (&)[VECTORS], Floats (&)[VECTORS]) {}
#ifdef __AVX512BF16__
    typedef Pairs Weights;
    INLINE Weights get(const char* at, int vector, int, const Floats (&)[VECTORS], const Floats (&)[VECTORS]) {
        const int8_t* from = (const int8_t*)at + vector * LANES;  // whole numbers up to 127 are exact bfloat16
        return ((Pairs)whole_at(from) >> 16) | (Pairs)whole_at(from + WIDTH);
    }
#else
    typedef Floats Weights;
    INLINE Weights get(const char* at, int vector, int step, const Floats (&)[VECTORS], const Floats (&)[VECTORS]) {
        return whole_at((const int8_t*)at + step * WIDTH + vector * LANES);
    }
#endif
};

struct Int4 {
    typedef Both Input;
    static constexpr int STEPS = 2 / AT_ONCE;
    static constexpr int64_t PAIR = WIDTH, HEADER = 2 * WIDTH * 2;  // scales, then zeros, in bfloat16
    INLINE void header(const char* at, Floats (&scale)[VECTORS], Floats (&zero)[VECTORS]) {
        for (int vector = 0; vector < VECTORS; vector++) {
            scale[vector] = floats_at((const uint16_t*)at + vector * LANES);
            zero[vector] = fused(scale[vector], all(-8.0f), floats_at((const uint16_t*)at + WIDTH + vector * LANES));
        }
    }
    INLINE Floats one(Ints bytes, int step, Floats scale, Floats zero) {
        return fused(__builtin_convertvector(step ? bytes >> 4 : bytes & 15, Floats), scale, zero);
    }
#ifdef __AVX512BF16__
    typedef Pairs Weights;
    INLINE Weights get(const char* at, int vector, int, const Floats (&scale)[VECTORS], const Floats (&zero)[VECTORS]) {
        const Ints bytes = bytes_at((const uint8_t*)at + vector * LANES);
        return as_pairs(one(bytes, 0, scale[vector], zero[vector]), one(bytes, 1, scale[vector], zero[vector]));
    }
#else
    typedef Floats Weights;
    INLINE Weights get(const char* at, int vector, int step, const Floats (&scale)[VECTORS], const Floats (&zero)[VECTORS]) {
        return one(bytes_at((const uint8_t*)at + vector * LANES), step, scale[vector], zero[vector]);
    }
#endif
};

// The room of a thread for a block of `inputs` inputs as bfloat16, at a cache line's start.
static char* room_of(int64_t inputs) {
    static thread_local std::vector<char> room;
    const size_t size = inputs / GROUP * ROOM + 64;
    if (room.size() < size) room.resize(size);
    return (char*)(((uintptr_t)room.data() + 63) & ~(uintptr_t)63);
}

// Makes a thread's room for products; false where there is no memory.
static bool make_room(int64_t inputs) {
    try {
        room_of(inputs);
    } catch (const std::exception&) {
        return false;
    }
    return true;
}

#ifdef HAS_TILES
template <typename Reader>
constexpr int64_t STEP_BYTES = GROUP / 2 * Reader::PAIR + Reader::HEADER;

// A block's weights where they lie, step by step.
template <typename Reader>
struct InPlace {
    const char* data;
    inline const char* step(int64_t number) const { return data + number * STEP_BYTES<Reader>; }
};

// Bring a step of whole numbers to bfloat16.
template <typename Reader>
struct Unpacker {
    Unpacker(const Weight&, int64_t) {}
    inline void unpack(const char* at, char* into) {
        Floats scale[VECTORS], zero[VECTORS];
        if (Reader::HEADER) Reader::header(at, scale, zero), at += Reader::HEADER;
        for (int64_t pair = 0; pair < GROUP / 2; pair++, at += Reader::PAIR)
            for (int vector = 0; vector < VECTORS; vector++) {
                const auto weights = Reader::get(at, vector, 0, scale, zero);
                __builtin_memcpy(into + (pair * VECTORS + vector) * LANES * 4, &weights, sizeof weights);
            }
    }
};

// bfloat16 in 12 bits.
struct Bfloat12 {
    static constexpr int64_t PAIR = STEP / TOGETHER * SHORT_BYTES / (GROUP / 2), HEADER = 0;
};

// Bring a step of 12 bits to bfloat16.
template <>
struct Unpacker<Bfloat12> {
    const uint8_t* table;
    const Patch *patch, *end;
    int64_t place;  // of the step's first weight

    Unpacker(const Weight& weight, int64_t block)
        : table(weight.table), patch(weight.patches + weight.first_patch[block]), end(weight.patches + weight.first_patch[block + 1]),
          place(block * weight.inputs * WIDTH) {
        for (int line = 0; line < 3; line++) __builtin_prefetch(end + 4 * line);  // of the next block
        __builtin_prefetch(weight.first_patch + block + 8);
    }

    inline void unpack(const char* at, char* into) {
        for (int64_t i = 0; i < STEP / TOGETHER; i++) lengthen(at + i * SHORT_BYTES, table, into + i * 2 * TOGETHER);
        for (; patch < end && patch->place < place + STEP; patch++) {
            const uint16_t bits = patch->bits;
            __builtin_memcpy(into + 2 * (patch->place - place), &bits, sizeof bits);
        }
        place += STEP;
    }
};

// A block's weights as bfloat16, each step unpacked when it is asked for first. `room` holds all steps, where they are `kept` for more
// tokens, or the last two.
template <typename Reader>
struct Unpacked {
    const char* data;
    char* room;
    bool kept;
    Unpacker<Reader> steps;
    int64_t done = 0;

    inline const char* step(int64_t number) {
        char* into = room + (kept ? number : number % 2) * ROOM;
        if (number < done) return into;
        done++;
        const char* at = data + number * STEP_BYTES<Reader>;
        for (int64_t byte = 0; byte < STEP_BYTES<Reader>; byte += 64) __builtin_prefetch(at + FAR * STEP_BYTES<Reader> + byte, 0, 2);
        steps.unpack(at, into);
        return into;
    }
};

#endif

// `tokens` tokens × one block. x: `stride` inputs a token. out: `outputs` a token. Fetches what begins at `soon`, `fetched` bytes an input pair.
template <int tokens, typename Reader>
static void block(const typename Reader::Input* x, int64_t stride, const char* at, float* out, int64_t inputs, int64_t outputs, const char* soon,
                  int64_t fetched) {
    Floats sums[tokens][VECTORS] = {}, scale[VECTORS], zero[VECTORS];
    for (int64_t input = 0; input < inputs; input += 2, at += Reader::PAIR, soon += fetched) {
        if (Reader::HEADER && input % GROUP == 0) Reader::header(at, scale, zero), at += Reader::HEADER;
        for (int64_t byte = 0; byte < Reader::PAIR; byte += 64) __builtin_prefetch(soon + byte);
#pragma GCC unroll 2
        for (int step = 0; step < Reader::STEPS; step++) {
            const auto first = Reader::get(at, 0, step, scale, zero), second = Reader::get(at, 1, step, scale, zero);
            const typename Reader::Input* one = x + input * Reader::STEPS / 2 + step;
#pragma GCC unroll 12
            for (int token = 0; token < tokens; token++) {
                sums[token][0] = plus_product(sums[token][0], first, one[token * stride]);
                sums[token][1] = plus_product(sums[token][1], second, one[token * stride]);
            }
        }
    }
#pragma GCC unroll 12
    for (int token = 0; token < tokens; token++)
        for (int vector = 0; vector < VECTORS; vector++) write(out + token * outputs + vector * LANES, sums[token][vector]);
}

// `block` by the number of tokens, less one.
template <typename Reader, int... less>
static constexpr auto blocks(std::integer_sequence<int, less...>) {
    return std::array{block<less + 1, Reader>...};
}

// In parts of up to MOST tokens. One part is waited for by the memory; several compute for longer, and each fetches its share of the next
// block meanwhile.
template <typename Reader>
static void block_by_parts(const void* x, const char* weight, float* out, int64_t tokens, int64_t inputs, int64_t outputs, int64_t bytes) {
    static constexpr auto by_tokens = blocks<Reader>(std::make_integer_sequence<int, MOST>());
    const int64_t parts = (tokens + MOST - 1) / MOST, stride = inputs * Reader::STEPS / 2;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t start = tokens * part / parts, end = tokens * (part + 1) / parts;
        by_tokens[end - start - 1]((const typename Reader::Input*)x + start * stride, stride, weight, out + start * outputs, inputs, outputs,
                                   weight + (parts == 1 ? AHEAD : bytes + bytes * part / parts), Reader::PAIR / parts);
    }
}

#ifdef HAS_TILES
// All tokens × one block, 32 tokens at once.
template <typename Block>
INLINE void block_by_tiles(const uint16_t* x, Block weights, float* out, int64_t tokens, int64_t inputs, int64_t outputs, bool fetches) {
    const int64_t stride = inputs * sizeof(uint16_t), wide = outputs * sizeof(float), pair = VECTORS * BYTES;
    for (int64_t start = 0; start < tokens; start += 2 * TILE) {
        const int64_t first = first_of(start, tokens), second = first_of(start + TILE, tokens);
        const bool both = start + TILE < tokens;
        clear_sums();
        const char* next = weights.step(0);
        for (int64_t input = 0; input < inputs; input += GROUP) {
            const char* at = next;
            if (fetches && start == 0)
                for (int64_t byte = 0; byte < ROOM; byte += 64) __builtin_prefetch(at + AHEAD + byte);
            // a step before it is read, which would wait for what was just written
            if (input + GROUP < inputs) next = weights.step(input / GROUP + 1);
            LOAD_TILE(6, at, pair);
            LOAD_TILE(7, at + BYTES, pair);
            LOAD_TILE(4, x + first * inputs + input, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!both) continue;
            LOAD_TILE(5, x + second * inputs + input, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out + first * outputs, wide);
        _tile_stored(1, out + first * outputs + LANES, wide);
        if (!both) continue;
        _tile_stored(2, out + second * outputs, wide);
        _tile_stored(3, out + second * outputs + LANES, wide);
    }
}
#endif

// Scale and bias of one block of all tokens.
INLINE void finish(const Weight& weight, float* out, int64_t at, int64_t tokens) {
    if (!weight.scale && !weight.bias) return;
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t from = at; from < at + WIDTH; from += LANES) {
            float* into = out + token * weight.outputs + from;
            if (weight.scale) write(into, floats_at(into) * floats_at(weight.scale + from));
            if (weight.bias) write(into, floats_at(into) + floats_at(weight.bias + from));
        }
}

#ifdef HAS_TILES
template <typename Reader>
static void product_by_tiles(const void* x, const Weight& weight, float* out, int64_t tokens) {
    const int64_t steps = weight.inputs / GROUP, blocks = weight.outputs / WIDTH;
    const Tiles tiles(tokens);
#pragma omp for schedule(static)
    for (int64_t number = 0; number < blocks; number++) {
        const char* data = weight.data + number * steps * STEP_BYTES<Reader>;
        float* into = out + number * WIDTH;
        const auto multiply = [&](const auto& own, bool fetches) {
            block_by_tiles((const uint16_t*)x, own, into, tokens, weight.inputs, weight.outputs, fetches);
        };
        if constexpr (std::is_same_v<Reader, Bfloat16>) multiply(InPlace<Reader>{data}, true);
        else multiply(Unpacked<Reader>{data, room_of(weight.inputs), tokens > 2 * TILE, {weight, number}}, false);
        finish(weight, out, number * WIDTH, tokens);
    }
}
#endif

template <typename Reader>
static void product_by(const void* x, const Weight& weight, float* out, int64_t tokens) {
#ifdef HAS_TILES
    if constexpr (!std::is_same_v<Reader, Float32>)
        if (TILES) return product_by_tiles<Reader>(x, weight, out, tokens);
#endif
    const int64_t bytes = weight.inputs / 2 * Reader::PAIR + (Reader::HEADER ? weight.inputs / GROUP * Reader::HEADER : 0);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < weight.outputs; at += WIDTH) {
        block_by_parts<Reader>(x, weight.data + at / WIDTH * bytes, out + at, tokens, weight.inputs, weight.outputs, bytes);
        finish(weight, out, at, tokens);
    }
}

// Inputs [tokens, in] (`to_inputs`) → out [tokens, out]; called by all threads of a team.
static void product(const void* x, const Weight& weight, float* out, int64_t tokens) {
    switch (weight.kind) {
        case FLOAT32: return product_by<Float32>(x, weight, out, tokens);
        case BFLOAT16: return product_by<Bfloat16>(x, weight, out, tokens);
        case INT8: return product_by<Int8>(x, weight, out, tokens);
#ifdef HAS_TILES
        case BFLOAT12: return product_by_tiles<Bfloat12>(x, weight, out, tokens);
#endif
        default: return product_by<Int4>(x, weight, out, tokens);
    }
}

// LANES numbers as a weight's inputs, at place `at` of them.
INLINE void to_inputs(Floats numbers, void* inputs, int64_t at, int64_t kind) {
    if (kind == FLOAT32) return write((float*)inputs + at, numbers);
#ifdef __AVX512BF16__
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)numbers);
    __builtin_memcpy((uint16_t*)inputs + at, &halves, sizeof halves);
#else
    const Pairs bits = (Pairs)numbers;
    write((float*)inputs + at, (Floats)((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u));
#endif
}

// Zeros from place `from` of a token's inputs on, to where the weight's end.
INLINE void end_inputs(void* inputs, int64_t from, const Weight& weight) {
    for (int64_t at = (from + LANES - 1) / LANES * LANES; at < weight.inputs; at += LANES) to_inputs(Floats{}, inputs, at, weight.kind);
}

}  // namespace draftwell

#endif
