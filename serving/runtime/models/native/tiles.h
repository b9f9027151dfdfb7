// Tiles of AMX: 16 tokens by 32 inputs, times 32 inputs by 16 outputs. A tile adds in an order of its own, a token's row for itself, so
// what is summed by tiles is summed by tiles for one token, too.

#ifndef DRAFTWELL_TILES
#define DRAFTWELL_TILES

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace draftwell {

constexpr int64_t TILE = 16;      // tokens, outputs, or pairs of inputs
constexpr int64_t BYTES = 64;     // of a tile's row
// A process asks the system for the tiles' registers (ARCH_REQ_XCOMP_PERM, XTILEDATA).
static const bool TILES = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// Sums in tiles 0 to 3, tokens in 4 and 5, weights in 6 and 7; until it is left.
struct Tiles {
    explicit Tiles(int64_t tokens) {
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = BYTES, shape.rows[tile] = tile < 6 ? std::min(tokens, TILE) : TILE;
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Tiles() { _tile_release(); }
};

// Lines of 64 bytes, `stride` bytes apart. GCC's intrinsics, and that of the shapes, do not tell the compiler which memory they read, so
// that it may write there later than it should.
#define LOAD_TILE(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)), "m"(*(const char(*)[1 << 30])(from)))

INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// The last tile of tokens reaches back to those before it, which have the same sums again.
INLINE int64_t first_of(int64_t token, int64_t tokens) { return std::min(token, std::max<int64_t>(0, tokens - TILE)); }

}  // namespace draftwell

#endif
#endif
