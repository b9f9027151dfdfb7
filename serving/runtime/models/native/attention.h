// Attention of the tokens of a row over their slot.
//
// All scores of a query are kept until their softmax; sums run over the positions in one order, fused one by one, and what a query does
// not see counts 0. So a query's result depends on what it sees alone. In a tree a token sees what stands before the tree and its own
// path: their scores are brought side by side, as they would be without the rest of the tree, and the weights back to where their values
// are. By tiles (tiles.h) sums run over 32 positions at a time, along a tree's path as well.

#ifndef DRAFTWELL_ATTENTION
#define DRAFTWELL_ATTENTION

#include "tiles.h"
#include "vectors.h"

namespace draftwell {

constexpr int64_t CHUNK = 64;   // positions whose keys and values are brought into the first cache
constexpr int64_t QUERIES = 24;  // that read a slot together, about; by tiles twice as many
constexpr int64_t LEAD = 512;    // lines of memory that are fetched ahead

#ifdef __AVX512F__
constexpr int AT_A_TIME = 12;
#else
constexpr int AT_A_TIME = 6;
#endif

struct Shape {
    int64_t heads, kv_heads, dim;
    float scale, softcap;  // no softcap: 0
    int64_t groups() const { return heads / kv_heads; }
};

struct Row {
    int64_t first, start, count;  // place among the packed tokens, position, and tokens
    const int32_t* parents;       // of a tree: of each token the place in the row of the one before it, or -1
    const void* const* memory;    // keys and values of each layer, [kv_heads, positions, dim]
    int64_t head_stride;
};

// Numbers that stay allocated: given back, their pages would be mapped and cleared again for each layer.
template <typename Number>
struct Scratch {
    std::vector<Number> numbers;
    Number* room(int64_t count) {
        if ((int64_t)numbers.size() < count) numbers.resize(count);
        return numbers.data();
    }
};

// What a thread reads of a layer's keys and values: each line is fetched while what comes LEAD lines before it is computed.
class Ahead {
    struct Lines {
        const char *at, *end;
    };
    Lines lines[4] = {};  // keys and values that are attended to, and the next ones
    int now = 0;

   public:
    void queue(const void* keys, const void* values, int64_t bytes) {
        lines[0] = lines[2], lines[1] = lines[3];
        lines[2] = {(const char*)keys, (const char*)keys + bytes}, lines[3] = {(const char*)values, (const char*)values + bytes};
        now = 0;
    }

    inline void fetch(int64_t count) {
        for (; count > 0 && now < 4; now++)
            for (Lines& own = lines[now]; count > 0 && own.at < own.end; own.at += 64, count--) __builtin_prefetch(own.at, 0, 2);
        now = std::max(0, now - 1);
    }
};

// What a thread has made ready for tiles in its rooms, of a layer's keys and values of one head: whole chunks and blocks that stand before
// the end of a part. The next part of the same row goes on from there, and a thread takes parts in their order.
struct Ready {
    const void* keys = nullptr;
    int64_t from = 0, keys_until = 0, values_until = 0;  // positions
};

// c[q, 0..2 vectors) += the sum over k of a[q, k] b[k, 0..2 vectors)
template <int queries>
static void tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t inner) {
    Floats sums[queries][VECTORS];
#pragma GCC unroll 12
    for (int query = 0; query < queries; query++)
        for (int vector = 0; vector < VECTORS; vector++) sums[query][vector] = floats_at(c + query * c_stride + vector * LANES);
    for (int64_t k = 0; k < inner; k++, b += b_stride) {
        const Floats first = floats_at(b), second = floats_at(b + LANES);
#pragma GCC unroll 12
        for (int query = 0; query < queries; query++) {
            const Floats one = all(a[query * a_stride + k]);
            sums[query][0] = fused(one, first, sums[query][0]);
            sums[query][1] = fused(one, second, sums[query][1]);
        }
    }
#pragma GCC unroll 12
    for (int query = 0; query < queries; query++)
        for (int vector = 0; vector < VECTORS; vector++) write(c + query * c_stride + vector * LANES, sums[query][vector]);
}

template <int... less>
static constexpr auto tiles(std::integer_sequence<int, less...>) {
    return std::array{tile<less + 1>...};
}

// c [queries, width] += a [queries, inner] b [inner, width]
static void add_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t queries,
                        int64_t inner, int64_t width) {
    static constexpr auto by_queries = tiles(std::make_integer_sequence<int, AT_A_TIME>());
    const int64_t parts = (queries + AT_A_TIME - 1) / AT_A_TIME;
    for (int64_t at = 0; at < width; at += WIDTH)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t from = queries * part / parts, to = queries * (part + 1) / parts;
            by_queries[to - from - 1](a + from * a_stride, a_stride, b + at, b_stride, c + from * c_stride + at, c_stride, inner);
        }
}

// Keys [count, dim] → [dim, CHUNK] float32, zeros from `count` on.
template <typename Number>
static void turn_keys(const Number* keys, int64_t count, int64_t dim, float* to, Ahead& ahead) {
    for (int64_t at = 0; at < dim; at += LANES)
        for (int64_t from = 0; from < CHUNK; from += LANES) {
            ahead.fetch(LANES * LANES * sizeof(Number) / 64);
            Floats rows[LANES];
            for (int64_t i = 0; i < LANES; i++)
                rows[i] = from + i < count ? some_floats_at(keys + (from + i) * dim + at, dim - at) : Floats{};
            transpose(rows);
            for (int64_t i = 0; i < LANES && at + i < dim; i++) write(to + (at + i) * CHUNK + from, rows[i]);
        }
}

// Values [count, dim] → [count, width] float32, zeros from `dim` on.
template <typename Number>
static void widen_values(const Number* values, int64_t count, int64_t dim, int64_t width, float* to, Ahead& ahead) {
    for (int64_t position = 0; position < count; position++) {
        ahead.fetch((dim * sizeof(Number) + 63) / 64);
        for (int64_t at = 0; at < width; at += LANES)
            write(to + position * width + at, some_floats_at(values + position * dim + at, dim - at));
    }
}

// Scores of the positions from `begin` (the start of a vector) to `end` → their exponentials less the largest; the sum of these. `room`
// is the end of the vectors that hold them.
static float exponentials(const Shape& shape, float* scores, int64_t begin, int64_t seen_from, int64_t end, int64_t room) {
    const float none = -std::numeric_limits<float>::infinity();
    std::fill(scores + begin, scores + seen_from, none);
    std::fill(scores + end, scores + room, none);
    Floats most = all(none), sum = {};
    for (int64_t at = begin; at < room; at += LANES) {
        Floats some = floats_at(scores + at) * shape.scale;
        if (shape.softcap) {
            const Floats bent = shape.softcap * hyperbolic_tangent(some / shape.softcap);
            some = some == none ? some : bent;
        }
        most = some > most ? some : most;
        write(scores + at, some);
    }
    float largest = none;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    for (int64_t at = begin; at < room; at += LANES) {
        const Floats weights = exponential(floats_at(scores + at) - largest);
        write(scores + at, weights);
        sum += weights;
    }
    return sum_of(sum);
}

// The places of a tree's tokens from its root to `token`.
static void path_to(const int32_t* parents, int64_t token, std::vector<int64_t>& path) {
    path.clear();
    for (int64_t at = token; at >= 0; at = parents[at]) path.push_back(at);
    std::reverse(path.begin(), path.end());
}

// Scores of a query that sees what stands before `end`, within its window → weights, 0 for what it does not see; the sum of the weights.
static float weigh(const Shape& shape, int64_t end, int64_t window, float* scores, int64_t from, int64_t room) {
    const int64_t seen_from = window ? std::max<int64_t>(0, end - window) : 0, begin = seen_from / LANES * LANES;
    std::fill(scores + from, scores + begin, 0.0f);
    return exponentials(shape, scores, begin, seen_from, end, room);
}

// The scores of a tree's token along its path, side by side.
static void bring_path(const Row& row, int64_t token, float* scores, std::vector<int64_t>& path) {
    path_to(row.parents, token, path);
    for (size_t i = 0; i < path.size(); i++) scores[row.start + i] = scores[row.start + path[i]];
}

// The same of a tree's token, with scores and weights where the tokens are.
static float weigh_path(const Shape& shape, const Row& row, int64_t token, int64_t window, float* scores, int64_t from, int64_t room) {
    static thread_local std::vector<int64_t> path;
    bring_path(row, token, scores, path);
    const float sum = weigh(shape, row.start + path.size(), window, scores, from, room);
    for (int64_t i = path.size(); i-- > 0;) {
        const float weight = scores[row.start + i];
        scores[row.start + i] = 0;
        scores[row.start + path[i]] = weight;
    }
    return sum;
}

struct Positions {
    int64_t from, end, room;  // whole chunks: from the first to behind the last
};

// What tokens [t0, t1) of a row read together.
static Positions read_by(const Row& row, int64_t t0, int64_t t1, int64_t window) {
    const int64_t end = row.start + (row.parents ? row.count : t1), least = row.start + (row.parents ? 0 : t0) + 1;
    return {window ? std::max<int64_t>(0, least - window) / CHUNK * CHUNK : 0, end, (end + CHUNK - 1) / CHUNK * CHUNK};
}

// Tokens [t0, t1) of a row, by the query heads of one key head. query: [tokens, heads + 2 kv_heads, dim] with `stride` a token; out:
// [tokens, heads * dim], of the row's tokens both.
template <typename Number>
static void attend_by_vectors(const Shape& shape, const Row& row, int64_t layer, int64_t head, int64_t t0, int64_t t1, int64_t window,
                              const float* query, int64_t stride, float* out, Ahead& ahead) {
    static thread_local Scratch<float> turned, scored, summed, asked;
    const int64_t groups = shape.groups(), dim = shape.dim, width = (dim + WIDTH - 1) / WIDTH * WIDTH, queries = (t1 - t0) * groups;
    const Positions read = read_by(row, t0, t1, window);
    const int64_t from = read.from, end = read.end, room = read.room;
    const Number* keys = (const Number*)row.memory[2 * layer] + head * row.head_stride;
    const Number* values = (const Number*)row.memory[2 * layer + 1] + head * row.head_stride;
    float *chunk = turned.room(CHUNK * width), *scores = scored.room(queries * room), *found = summed.room(queries * width);
    float* asks = asked.room(queries * dim);

    for (int64_t number = 0; number < queries; number++)
        std::copy_n(query + (t0 + number / groups) * stride + (head * groups + number % groups) * dim, dim, asks + number * dim);
    for (int64_t number = 0; number < queries; number++) std::fill(scores + number * room + from, scores + (number + 1) * room, 0.0f);
    for (int64_t at = from; at < end; at += CHUNK) {
        turn_keys(keys + at * dim, std::min(CHUNK, end - at), dim, chunk, ahead);
        add_product(asks, dim, chunk, CHUNK, scores + at, room, queries, dim, CHUNK);
    }
    static thread_local std::vector<float> sums;
    sums.resize(queries);
    for (int64_t number = 0; number < queries; number++) {
        const int64_t token = t0 + number / groups;
        float* own = scores + number * room;
        sums[number] = row.parents ? weigh_path(shape, row, token, window, own, from, room)
                                   : weigh(shape, row.start + token + 1, window, own, from, room);
    }
    std::fill(found, found + queries * width, 0.0f);
    for (int64_t at = from; at < end; at += CHUNK) {
        const int64_t count = std::min(CHUNK, end - at);
        widen_values(values + at * dim, count, dim, width, chunk, ahead);
        add_product(scores + at, room, chunk, width, found, width, queries, count, width);
    }
    for (int64_t number = 0; number < queries; number++) {
        float* into = out + ((t0 + number / groups) * shape.heads + head * groups + number % groups) * dim;
        for (int64_t at = 0; at < dim; at += LANES) store(into + at, floats_at(found + number * width + at) / sums[number], dim - at);
    }
}

#ifdef HAS_TILES
// Numbers as two bfloat16, whose sum is within 2^-17 of them.
INLINE void in_two(Floats numbers, uint16_t* high, uint16_t* low) {
    const __m256bh top = _mm512_cvtneps_pbh((__m512)numbers);
    Halves bits;
    __builtin_memcpy(&bits, &top, sizeof bits);
    const __m256bh rest = _mm512_cvtneps_pbh((__m512)(numbers - widened(bits)));
    __builtin_memcpy(high, &top, sizeof top);
    __builtin_memcpy(low, &rest, sizeof rest);
}

// The first `count` bfloat16 of two vectors of them, then zeros.
INLINE Floats some_pairs_at(const uint16_t* from, int64_t count) {
    if (count >= 2 * LANES) return read<Floats>(from);
    uint16_t some[2 * LANES] = {};
    if (count > 0) __builtin_memcpy(some, from, std::min<int64_t>(count, 2 * LANES) * sizeof(uint16_t));
    return read<Floats>(some);
}

INLINE Pairs some_halves_at(const uint16_t* from, int64_t count) {
    Halves some = {};
    if (count >= LANES) some = read<Halves>(from);
    else if (count > 0) __builtin_memcpy(&some, from, count * sizeof(uint16_t));
    return __builtin_convertvector(some, Pairs);
}

// Keys or values of `count` positions from `at` on, with zeros from `end` on: where they are, or as copies. From `start` on a path's
// positions are those of its tokens.
static const uint16_t* lines_at(const uint16_t* memory, int64_t dim, int64_t at, int64_t count, int64_t start, int64_t end,
                                const std::vector<int64_t>& path, uint16_t* copies) {
    if (at + count <= (path.empty() ? end : start)) return memory + at * dim;
    std::fill(copies, copies + count * dim, 0);
    for (int64_t i = at; i < std::min(end, at + count); i++) {
        const int64_t place = path.empty() || i < start ? i : start + path[i - start];
        std::copy_n(memory + place * dim, dim, copies + (i - at) * dim);
    }
    return copies;
}

// Keys of CHUNK positions → of 32 dimensions, of 16 positions: the positions of each pair of dimensions.
static void turn_for_tiles(const uint16_t* lines, int64_t dim, int64_t width, uint16_t* into, Ahead& ahead) {
    for (int64_t part = 0; part < width; part += 2 * TILE)
        for (int64_t start = 0; start < CHUNK; start += TILE, into += 2 * TILE * TILE) {
            ahead.fetch(TILE);
            Floats rows[LANES];
            for (int64_t i = 0; i < TILE; i++) rows[i] = some_pairs_at(lines + (start + i) * dim + part, dim - part);
            transpose(rows);
            for (int64_t i = 0; i < TILE; i++) write((float*)into + i * TILE, rows[i]);
        }
}

// Values of 32 positions → of 16 dimensions: the dimensions of each pair of positions.
static void pair_for_tiles(const uint16_t* lines, int64_t dim, int64_t width, uint16_t* into, Ahead& ahead) {
    for (int64_t part = 0; part < width; part += TILE)
        for (int64_t pair = 0; pair < 2 * TILE; pair += 2, into += 2 * TILE) {
            ahead.fetch(1);
            const auto values = [&](int64_t i) { return some_halves_at(lines + i * dim + part, dim - part); };
            write((float*)into, (Floats)(values(pair) | values(pair + 1) << 16));
        }
}

// `attend` by tiles, over keys and values in bfloat16. Queries and weights are multiplied in two parts. A tree's tokens share the values
// of the whole blocks of 32 positions before it; each goes on from their sums along its own path.
static void attend_by_tiles(const Shape& shape, const Row& row, int64_t layer, int64_t head, int64_t t0, int64_t t1, int64_t window,
                            const float* query, int64_t stride, float* out, Ahead& ahead, Ready& ready) {
    static thread_local Scratch<float> scored, summed;
    static thread_local Scratch<uint16_t> asked, weighed, turned, paired, copied;
    static thread_local std::vector<int64_t> path;
    static thread_local std::vector<float> sums;
    const int64_t groups = shape.groups(), dim = shape.dim, width = (dim + WIDTH - 1) / WIDTH * WIDTH, queries = (t1 - t0) * groups;
    const Positions read = read_by(row, t0, t1, window);
    const int64_t from = read.from, end = read.end, room = read.room;
    const int64_t shared = row.parents ? row.start / (2 * TILE) * 2 * TILE : room;
    const uint16_t* keys = (const uint16_t*)row.memory[2 * layer] + head * row.head_stride;
    const uint16_t* values = (const uint16_t*)row.memory[2 * layer + 1] + head * row.head_stride;
    float *scores = scored.room(queries * room), *found = summed.room(2 * queries * width);
    uint16_t *asks = asked.room(2 * queries * width), *asks_low = asks + queries * width;
    uint16_t *weights = weighed.room(2 * queries * room), *weights_low = weights + queries * room;
    const bool keeps = !row.parents && t1 - t0 < row.count;  // for the row's other parts
    uint16_t *turned_keys = turned.room((keeps ? room - from : CHUNK) * width), *paired_values = paired.room((room - from) * width);
    uint16_t* copies = copied.room(CHUNK * dim);
    sums.resize(queries);
    path.clear();
    if (!keeps || ready.keys != keys || ready.from != from) ready = {keeps ? keys : nullptr, from, from, from};

    for (int64_t number = 0; number < queries; number++) {
        const float* one = query + (t0 + number / groups) * stride + (head * groups + number % groups) * dim;
        for (int64_t at = 0; at < width; at += LANES)
            in_two(some_floats_at(one + at, dim - at), asks + number * width + at, asks_low + number * width + at);
    }
    const Tiles tiles(queries);
    for (int64_t at = from; at < end; at += CHUNK) {
        uint16_t* chunk = turned_keys + (keeps ? (at - from) * width : 0);
        if (at >= ready.keys_until) {
            turn_for_tiles(lines_at(keys, dim, at, CHUNK, row.start, end, path, copies), dim, width, chunk, ahead);
            if (keeps && at + CHUNK <= end) ready.keys_until = at + CHUNK;
        }
        for (int64_t number = 0; number < queries; number += TILE) {
            const int64_t first = first_of(number, queries);
            const uint16_t* some = chunk;
            clear_sums();
            for (int64_t part = 0; part < width; part += 2 * TILE, some += CHUNK * 2 * TILE) {
                LOAD_TILE(4, asks + first * width + part, width * sizeof(uint16_t));
                LOAD_TILE(5, asks_low + first * width + part, width * sizeof(uint16_t));
                LOAD_TILE(6, some, BYTES);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(0, 5, 6);
                LOAD_TILE(7, some + 2 * TILE * TILE, BYTES);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(1, 5, 7);
                LOAD_TILE(6, some + 4 * TILE * TILE, BYTES);
                _tile_dpbf16ps(2, 4, 6);
                _tile_dpbf16ps(2, 5, 6);
                LOAD_TILE(7, some + 6 * TILE * TILE, BYTES);
                _tile_dpbf16ps(3, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            float* to = scores + first * room + at;
            _tile_stored(0, to, room * sizeof(float));
            _tile_stored(1, to + TILE, room * sizeof(float));
            _tile_stored(2, to + 2 * TILE, room * sizeof(float));
            _tile_stored(3, to + 3 * TILE, room * sizeof(float));
        }
    }
    for (int64_t number = 0; number < queries; number++) {
        const int64_t token = t0 + number / groups;
        float* own = scores + number * room;
        if (row.parents) bring_path(row, token, own, path);
        sums[number] = weigh(shape, row.start + (row.parents ? (int64_t)path.size() : token + 1), window, own, from, room);
        for (int64_t at = from; at < room; at += LANES)
            in_two(floats_at(own + at), weights + number * room + at, weights_low + number * room + at);
    }
    // Sums of the queries [number, number + count), over the positions [begin, stop): from `before` on, or from 0.
    const auto sum_values = [&](int64_t number, int64_t count, int64_t begin, int64_t stop, const float* before, float* into) {
        for (int64_t own = 0; own < count; own += TILE)
            for (int64_t part = 0; part < width; part += 2 * TILE) {
                const int64_t first = number + first_of(own, count);
                clear_sums();
                if (before) {
                    LOAD_TILE(0, before + first * width + part, width * sizeof(float));
                    LOAD_TILE(1, before + first * width + part + TILE, width * sizeof(float));
                }
                for (int64_t at = begin; at < stop; at += 2 * TILE) {
                    const uint16_t* some = paired_values + ((at - begin) * width + part * 2 * TILE);
                    LOAD_TILE(4, weights + first * room + at, room * sizeof(uint16_t));
                    LOAD_TILE(5, weights_low + first * room + at, room * sizeof(uint16_t));
                    LOAD_TILE(6, some, BYTES);
                    LOAD_TILE(7, some + 2 * TILE * TILE, BYTES);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(0, 5, 6);
                    _tile_dpbf16ps(1, 5, 7);
                }
                _tile_stored(0, into + first * width + part, width * sizeof(float));
                _tile_stored(1, into + first * width + part + TILE, width * sizeof(float));
            }
    };
    const auto pair_values = [&](int64_t begin, int64_t stop, int64_t last) {
        for (int64_t at = begin; at < stop; at += 2 * TILE) {
            if (at < ready.values_until) continue;
            const uint16_t* lines = lines_at(values, dim, at, 2 * TILE, row.start, last, path, copies);
            pair_for_tiles(lines, dim, width, paired_values + (at - begin) * width, ahead);
            if (keeps && at + 2 * TILE <= last) ready.values_until = at + 2 * TILE;
        }
    };
    path.clear();
    pair_values(from, shared, end);
    sum_values(0, queries, from, shared, nullptr, found);
    if (row.parents) {
        const float* before = found;
        found += queries * width;
        const Tiles of_a_token(groups);
        for (int64_t token = t0; token < t1; token++) {
            path_to(row.parents, token, path);
            const int64_t last = row.start + path.size(), stop = (last + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
            pair_values(shared, stop, last);
            sum_values((token - t0) * groups, groups, shared, stop, before, found);
        }
    }
    for (int64_t number = 0; number < queries; number++) {
        float* to = out + ((t0 + number / groups) * shape.heads + head * groups + number % groups) * dim;
        for (int64_t at = 0; at < dim; at += LANES) store(to + at, floats_at(found + number * width + at) / sums[number], dim - at);
    }
}
#endif

// Whether keys and values in bfloat16 are read by tiles.
INLINE bool by_tiles() {
#ifdef HAS_TILES
    return TILES;
#else
    return false;
#endif
}

template <typename Number, typename... Rest>
INLINE void attend(Ahead& ahead, Ready& ready, const Rest&... rest) {
#ifdef HAS_TILES
    if constexpr (sizeof(Number) == sizeof(uint16_t))
        if (TILES) return attend_by_tiles(rest..., ahead, ready);
#endif
    attend_by_vectors<Number>(rest..., ahead);
}

}  // namespace draftwell

#endif
