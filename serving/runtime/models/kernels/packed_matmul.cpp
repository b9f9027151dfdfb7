// Products of a few tokens with a fixed weight: every weight is read from memory once, for all tokens, as fast as it comes.
//
// A weight [out, in] lies in blocks of two vectors of outputs (packed_matmul.py). Of a block, two inputs of all its outputs follow each
// other. Each vector is multiplied with the same inputs of up to MOST tokens, whose sums stay in registers. All sums are float32 and run
// over the inputs in one order, so a token's result does not depend on how many others there are.

#ifndef DRAFTWELL_PACKED_MATMUL
#define DRAFTWELL_PACKED_MATMUL

#include <array>
#include <cstdint>
#include <utility>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#pragma GCC push_options
#pragma GCC optimize("O2")  // what surrounds it in a library is compiled with less
// Templates are compiled at the end of a file, with other options: there GCC inlines nothing of what stands here unless it has to, and a
// call for every vector costs four fifths of the speed.
#define INLINE static inline __attribute__((always_inline))

namespace draftwell {

constexpr int VECTORS = 2;       // in a block
#ifdef __AVX512F__
constexpr int LANES = 16;        // outputs in a vector
constexpr int MOST = 12;         // tokens whose 2 * 12 sums, two vectors of weights and one of inputs fill 27 of 32 registers
#else
constexpr int LANES = 8;
constexpr int MOST = 6;          // 15 of 16 registers
#endif
constexpr int64_t AHEAD = 2048;  // bytes between what is multiplied and what is fetched: 1024 to 4096 were alike

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Pairs __attribute__((vector_size(4 * LANES)));  // two bfloat16 each, the first in the lower half

INLINE Pairs pairs_at(const uint16_t* weight) {
    Pairs pairs;
    __builtin_memcpy(&pairs, weight, sizeof pairs);
    return pairs;
}

// Of int8, a vector's weights of the first input come before those of the second.
INLINE Floats floats_at(const int8_t* whole) {
    Floats out;
#if defined(__AVX512F__)
    out = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)whole)));
#elif defined(__AVX2__)
    out = (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)whole)));
#else
    for (int lane = 0; lane < LANES; lane++) out[lane] = whole[lane];
#endif
    return out;
}

// What is multiplied at once: two inputs where there is an instruction for it, otherwise one.
#ifdef __AVX512BF16__
constexpr int AT_ONCE = 2;
typedef uint32_t Input;  // two bfloat16
typedef Pairs Weights;

INLINE Weights load(const uint16_t* weight, int) { return pairs_at(weight); }

// Whole numbers up to 127 are exact bfloat16.
INLINE Weights load(const int8_t* weight, int) {
    return ((Pairs)floats_at(weight) >> 16) | (Pairs)floats_at(weight + LANES);
}

INLINE Floats plus_product(Floats sum, Weights weights, Input both) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)(Pairs{} + both));
}
#else
constexpr int AT_ONCE = 1;
typedef float Input;
typedef Floats Weights;

INLINE Weights load(const uint16_t* weight, int second) {
    return (Floats)(second ? pairs_at(weight) & 0xffff0000u : pairs_at(weight) << 16);
}

INLINE Weights load(const int8_t* weight, int second) { return floats_at(weight + second * LANES); }

INLINE Floats plus_product(Floats sum, Weights weights, Input input) { return sum + weights * input; }
#endif

// Buffers are kept: given back, they would be mapped and cleared again for every layer. Very large ones are worth less than the memory.
template <typename Number>
static void give_back_if_large(std::vector<Number>& buffer) {
    if (buffer.capacity() * sizeof(Number) > (16 << 20)) std::vector<Number>().swap(buffer);
}

// bfloat16 [count] as they are multiplied; those that are made are kept in `made`.
INLINE const Input* as_inputs(const uint16_t* x, int64_t count, std::vector<Input>& made) {
    if (AT_ONCE == 2) return (const Input*)x;
    made.resize(count);
    Input* into = made.data();
#pragma omp parallel for schedule(static) if (count > 1 << 15)
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        __builtin_memcpy(into + i, &bits, sizeof bits);
    }
    return into;
}

// `tokens` tokens × one block. x: `inputs` a token. out: `outputs` a token.
template <int tokens, typename Weight>
static void block(const Input* x, const Weight* weight, float* out, int64_t inputs, int64_t outputs) {
    Floats sums[tokens][VECTORS] = {};
    for (int64_t pair = 0; pair < inputs * AT_ONCE / 2; pair++, weight += VECTORS * LANES * 2) {
        for (int64_t byte = 0; byte < VECTORS * LANES * 2 * (int64_t)sizeof(Weight); byte += 64)
            __builtin_prefetch((const char*)weight + AHEAD + byte);
#pragma GCC unroll 2
        for (int step = 0; step < 2 / AT_ONCE; step++) {
            const Weights first = load(weight, step), second = load(weight + LANES * 2, step);
            const Input* input = x + pair * 2 / AT_ONCE + step;
#pragma GCC unroll 12
            for (int token = 0; token < tokens; token++) {
                sums[token][0] = plus_product(sums[token][0], first, input[token * inputs]);
                sums[token][1] = plus_product(sums[token][1], second, input[token * inputs]);
            }
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

// `tokens` tokens × one block, in parts of up to MOST tokens; all but the first find the block's weights in the cache.
template <typename Weight>
static void block_by_parts(const Input* x, const Weight* weight, float* out, int64_t tokens, int64_t inputs, int64_t outputs) {
    static constexpr auto by_tokens = blocks<Weight>(std::make_integer_sequence<int, MOST>());
    const int64_t parts = (tokens + MOST - 1) / MOST;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t start = tokens * part / parts, end = tokens * (part + 1) / parts;
        by_tokens[end - start - 1](x + start * inputs, weight, out + start * outputs, inputs, outputs);
    }
}

// x [tokens, 2 * pairs] bfloat16 → out [tokens, outputs] float32.
template <typename Weight>
static void matmul(const uint16_t* x, const Weight* weight, float* out, int64_t tokens, int64_t pairs, int64_t outputs) {
    const int64_t width = VECTORS * LANES, inputs = 2 * pairs / AT_ONCE;
    static thread_local std::vector<Input> made;
    const Input* input = as_inputs(x, tokens * 2 * pairs, made);
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < outputs / width; at++)
        block_by_parts(input, weight + at * width * pairs * 2, out + at * width, tokens, inputs, outputs);
    give_back_if_large(made);
}

}  // namespace draftwell

#pragma GCC pop_options

#endif
