// Vectors of float32, and functions of them that give each number the same result in every lane.
//
// Sums of products are fused by name: the compiler is told to fuse nothing by itself (`-ffp-contract=off`), so that two loops over
// the same numbers cannot differ.

#ifndef DRAFTWELL_VECTORS
#define DRAFTWELL_VECTORS

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace draftwell {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int VECTORS = 2;                // that are multiplied by the same number at once
constexpr int64_t WIDTH = VECTORS * LANES;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Pairs __attribute__((vector_size(4 * LANES)));  // two bfloat16 each, the first in the lower half
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// A number in every lane; not by adding it to 0, which changes the sign of -0 and so costs an addition.
INLINE Floats all(float number) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(number);
#elif defined(__AVX__)
    return (Floats)_mm256_set1_ps(number);
#else
    return Floats{number, number, number, number, number, number, number, number};
#endif
}

template <typename Vector>
INLINE Vector read(const void* from) {
    Vector out;
    __builtin_memcpy(&out, from, sizeof out);
    return out;
}

INLINE void write(float* to, Floats what) { __builtin_memcpy(to, &what, sizeof what); }

INLINE Floats widened(Halves halves) { return (Floats)(__builtin_convertvector(halves, Pairs) << 16); }

INLINE Floats floats_at(const float* from) { return read<Floats>(from); }
INLINE Floats floats_at(const uint16_t* from) { return widened(read<Halves>(from)); }

// The first `count` numbers, then zeros.
template <typename Number>
INLINE Floats some_floats_at(const Number* from, int64_t count) {
    if (count >= LANES) return floats_at(from);
    Number some[LANES] = {};
    if (count > 0) __builtin_memcpy(some, from, count * sizeof(Number));
    return floats_at(some);
}

// The nearest bfloat16, of two the even one, as their bits.
INLINE Halves rounded(Floats numbers) {
    const Pairs bits = (Pairs)numbers, halves = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? Pairs{} + 0x7fc0u : halves, Halves);
}

// The first `count` of some numbers.
INLINE void store(float* to, Floats numbers, int64_t count) { __builtin_memcpy(to, &numbers, std::min<int64_t>(count, LANES) * sizeof(float)); }
INLINE void store(uint16_t* to, Floats numbers, int64_t count) {
    const Halves halves = rounded(numbers);
    __builtin_memcpy(to, &halves, std::min<int64_t>(count, LANES) * sizeof(uint16_t));
}

// In one order: lane by lane.
INLINE float sum_of(Floats lanes) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    return total;
}

// Within 2e-7 of the exponential; 0 below -87, and what 88 gives above it.
INLINE Floats exponential(Floats given) {
    const Floats least = all(-87.0f), most = all(88.0f), magic = all(12582912.0f);
    Floats x = given > least ? given : least;
    x = x < most ? x : most;
    const Floats whole = fused(x, all(1.44269504f), magic) - magic;  // rounded to an integer
    const Ints power = __builtin_convertvector(whole, Ints);
    const Floats rest = fused(whole, all(2.12194440e-4f), fused(whole, all(-0.693359375f), x));
    Floats sum = fused(rest, all(1.0f / 720), all(1.0f / 120));
    sum = fused(sum, rest, all(1.0f / 24));
    sum = fused(sum, rest, all(1.0f / 6));
    sum = fused(sum, rest, all(0.5f));
    sum = fused(sum, rest, all(1.0f));
    sum = fused(sum, rest, all(1.0f));
    return (Floats)(((Ints)sum + (power << 23)) & (given > least));
}

INLINE Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (1.0f + exponential(x + x)); }

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
INLINE void transpose(Floats (&rows)[LANES]) {
#pragma GCC unroll 4
    for (int stage = 1; stage < LANES; stage *= 2) {
        Floats next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = INTERLEAVED(rows[i], rows[i + LANES / 2], LOW);
            next[2 * i + 1] = INTERLEAVED(rows[i], rows[i + LANES / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

}  // namespace draftwell

#endif
