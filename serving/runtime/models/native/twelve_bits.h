// bfloat16 in 12 bits, to the bit: of the higher bytes of a trained weight, sign and most of the exponent, a few are common. They are
// written as their places in a table of 16, lower bytes as they are, and a number with another higher byte is put in its place afterwards.
//
// 128 numbers take 192 bytes: 128 lower bytes, then 64 bytes of two places each, in the order in which vectors bring lower and higher
// bytes together. Only tiles multiply so fast that there is time to unpack.

#ifndef DRAFTWELL_TWELVE_BITS
#define DRAFTWELL_TWELVE_BITS

#include "tiles.h"
#include "vectors.h"

namespace draftwell {

constexpr int64_t TOGETHER = 128, SHORT_BYTES = 192;

// A number whose higher byte is not in the table.
struct Patch {
    int64_t place, bits;
};

// Where the lower byte of number `i` of 128 is; byte `line_of(i) % 64` after them has its place in the table.
INLINE int64_t line_of(int64_t i) { return i / 64 * 64 + i / 8 % 4 * 16 + i / 32 % 2 * 8 + i % 8; }

#ifdef HAS_TILES
// 128 numbers but for those that are patched.
INLINE void lengthen(const char* from, const uint8_t* table, char* to) {
    const __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), low_four = _mm512_set1_epi8(15);
    const __m512i places = _mm512_loadu_si512(from + TOGETHER);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m512i own = _mm512_and_si512(half ? _mm512_srli_epi16(places, 4) : places, low_four);
        const __m512i lower = _mm512_loadu_si512(from + 64 * half), higher = _mm512_shuffle_epi8(high, own);
        _mm512_storeu_si512(to + 128 * half, _mm512_unpacklo_epi8(lower, higher));
        _mm512_storeu_si512(to + 128 * half + 64, _mm512_unpackhi_epi8(lower, higher));
    }
}
#endif

// Chooses the 16 commonest higher bytes of `blocks` times `block` numbers, and says for each block which is the first of its patches, and
// last how many there are.
static void choose_table(const uint16_t* numbers, int64_t blocks, int64_t block, uint8_t* table, int64_t* first) {
    int64_t counts[256] = {};
#pragma omp parallel for schedule(static) reduction(+ : counts[:256])
    for (int64_t i = 0; i < blocks * block; i++) counts[numbers[i] >> 8]++;
    std::array<uint8_t, 256> bytes;
    for (int i = 0; i < 256; i++) bytes[i] = i;
    std::stable_sort(bytes.begin(), bytes.end(), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
    std::copy_n(bytes.begin(), 16, table);
    bool known[256] = {};
    for (int i = 0; i < 16; i++) known[table[i]] = true;
#pragma omp parallel for schedule(static)
    for (int64_t number = 0; number < blocks; number++) {
        int64_t others = 0;
        for (int64_t i = number * block; i < (number + 1) * block; i++) others += !known[numbers[i] >> 8];
        first[number + 1] = others;
    }
    first[0] = 0;
    for (int64_t number = 0; number < blocks; number++) first[number + 1] += first[number];
}

// Writes blocks of numbers, a multiple of 128 each, in 12 bits, with a table and places of patches as `choose_table` found them.
static void shorten(const uint16_t* numbers, int64_t blocks, int64_t block, const uint8_t* table, const int64_t* first, char* to, Patch* patches) {
    int place[256];
    std::fill_n(place, 256, -1);
    for (int i = 0; i < 16; i++) place[table[i]] = i;
#pragma omp parallel for schedule(static)
    for (int64_t number = 0; number < blocks; number++) {
        Patch* patch = patches + first[number];
        char* into = to + number * block / TOGETHER * SHORT_BYTES;
        for (int64_t start = number * block; start < (number + 1) * block; start += TOGETHER, into += SHORT_BYTES) {
            std::fill_n(into + TOGETHER, SHORT_BYTES - TOGETHER, 0);
            for (int64_t i = 0; i < TOGETHER; i++) {
                const uint16_t bits = numbers[start + i];
                const int64_t line = line_of(i);
                const int known = place[bits >> 8];
                if (known < 0) *patch++ = {start + i, bits};
                into[line] = bits & 255;
                into[TOGETHER + line % 64] |= std::max(known, 0) << 4 * (i / 64);
            }
        }
    }
}

}  // namespace draftwell

#endif
