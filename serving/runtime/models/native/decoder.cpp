// A decoder's layers over packed tokens, by one order of addition whatever stands beside a token: its states depend on its own text alone.
//
// `draftwell_layers` runs all of them in one team of threads. Between products everything is float32; a token's state is rounded nowhere.

#include <atomic>
#include <exception>

#include <omp.h>

#include "attention.h"
#include "product.h"

using namespace draftwell;

struct Layer {
    const float *attention_norm, *beside_norm, *mlp_norm, *after_attention, *after_mlp;  // [hidden] or none
    const float* qk_norm;     // [heads + kv_heads, dim] or none
    const float *cos, *sin;   // [positions, dim]; the sines of the first half negative
    int64_t window;           // positions that a token sees, its own included; 0: all
    Weight qkv, out;
    int64_t feed_forwards;
    const Weight* feed_forward;  // gate and up, one below the other, and down; of each
};

struct Decoder {
    int64_t layers, hidden;
    Shape shape;
    float eps;
    int64_t gelu;      // the activation: gelu by tanh, else silu
    int64_t halves;    // keys and values are bfloat16, else float32
    const Layer* layer;
};

struct Pass {
    int64_t tokens;
    float* x;                  // [tokens, hidden], before the layers → after them
    const float* beside;       // [tokens, hidden], what a head's layer reads beside x, or none
    const int64_t* positions;  // [tokens]
    int64_t rows;
    const Row* row;
    const uint8_t* skip;       // [2 * layers]: attention, feed-forward of each layer, or none
    int64_t notes;             // layers before which states are noted
    const int64_t* noted;      // ascending
    float* notes_into;         // [tokens, notes * hidden]
};

namespace {

struct Item {
    const Row* row;
    int64_t head, from, to;
};

// RMS norm of [count] numbers, weight by weight, `LANES` at a time handed to `take(place, numbers)`.
template <typename Take>
INLINE void norm(const float* x, const float* weight, int64_t count, float eps, Take take) {
    Floats squares = {};
    for (int64_t at = 0; at < count; at += LANES) {
        const Floats some = some_floats_at(x + at, count - at);
        squares = fused(some, some, squares);
    }
    const float factor = 1.0f / std::sqrt(sum_of(squares) / count + eps);
    for (int64_t at = 0; at < count; at += LANES)
        take(at, some_floats_at(x + at, count - at) * factor * some_floats_at(weight + at, count - at));
}

char* row_of(void* inputs, const Weight& weight, int64_t token) {
    const int64_t size = weight.kind == FLOAT32 || AT_ONCE == 1 ? 4 : 2;
    return (char*)inputs + token * weight.inputs * size;
}

// x + (the norm of) what a part of a layer found.
INLINE void add(float* x, const float* found, const float* weight, int64_t count, float eps) {
    const auto plus = [&](int64_t at, Floats some) { store(x + at, some_floats_at(x + at, count - at) + some, count - at); };
    if (weight) return norm(found, weight, count, eps, plus);
    for (int64_t at = 0; at < count; at += LANES) plus(at, some_floats_at(found + at, count - at));
}

// Norm and rotation of a head's query or key, in place.
INLINE void place_head(float* head, const float* weight, const float* cos, const float* sin, int64_t dim, float eps) {
    if (weight) norm(head, weight, dim, eps, [&](int64_t at, Floats some) { store(head + at, some, dim - at); });
    const int64_t half = dim / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        const Floats low = some_floats_at(head + at, half - at), high = some_floats_at(head + half + at, half - at);
        const auto turned = [&](Floats own, Floats other, int64_t from) {
            return fused(other, some_floats_at(sin + from, half - at), own * some_floats_at(cos + from, half - at));
        };
        store(head + at, turned(low, high, at), half - at);
        store(head + half + at, turned(high, low, half + at), half - at);
    }
}

template <typename Number>
void keep(const float* head, void* memory, int64_t place, int64_t dim) {
    Number* to = (Number*)memory + place * dim;
    for (int64_t at = 0; at < dim; at += LANES) store(to + at, some_floats_at(head + at, dim - at), dim - at);
}

struct Buffers {
    Scratch<float> inputs, wide, found;
    std::vector<Item> items;
    std::atomic<size_t> next;  // of the items that no thread has begun with
    std::atomic<bool> failed;  // a thread had no memory left
};

// Parts of rows, so that a few queries read a slot together; those of a head side by side.
void split(const Decoder& decoder, const Pass& pass, std::vector<Item>& items) {
    const int64_t queries = decoder.halves && by_tiles() ? 2 * QUERIES : QUERIES;
    const int64_t most = std::max<int64_t>(1, queries / decoder.shape.groups());
    items.clear();
    for (int64_t row = 0; row < pass.rows; row++) {
        const int64_t count = pass.row[row].count, parts = (count + most - 1) / most;
        for (int64_t head = 0; head < decoder.shape.kv_heads; head++)
            for (int64_t part = 0; part < parts; part++)
                items.push_back({pass.row + row, head, count * part / parts, count * (part + 1) / parts});
    }
}

// What a thread attends to next is fetched next.
template <typename Number>
void queue_item(Ahead& ahead, const Shape& shape, const Item* item, int64_t layer, int64_t window) {
    if (!item) return ahead.queue(nullptr, nullptr, 0);
    const int64_t from = read_by(*item->row, item->from, item->to, window).from, end = item->row->start;
    const auto lines = [&](int64_t part) {
        return (const Number*)item->row->memory[2 * layer + part] + item->head * item->row->head_stride + from * shape.dim;
    };
    ahead.queue(lines(0), lines(1), std::max<int64_t>(0, end - from) * shape.dim * sizeof(Number));
}

template <typename Number>
void attention(const Decoder& decoder, const Pass& pass, int64_t number, Buffers& own) {
    const Layer& layer = decoder.layer[number];
    const Shape& shape = decoder.shape;
    const int64_t dim = shape.dim, rotated = shape.heads + shape.kv_heads;
    float *inputs = own.inputs.numbers.data(), *wide = own.wide.numbers.data(), *found = own.found.numbers.data();
    const size_t thread = omp_get_thread_num(), count = own.items.size();
    const auto item = [&](size_t i) { return i < count ? &own.items[i] : nullptr; };
    Ahead ahead;
    Ready ready;
    queue_item<Number>(ahead, shape, item(thread), number, layer.window);
    ahead.fetch(LEAD);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < pass.tokens; token++) {
        char* row = row_of(inputs, layer.qkv, token);
        const int64_t hidden = decoder.hidden, kind = layer.qkv.kind;
        const auto into = [&](int64_t from) { return [=](int64_t at, Floats some) { to_inputs(some, row, from + at, kind); }; };
        end_inputs(row, layer.qkv.given, layer.qkv);
        const float* x = pass.x + token * hidden;
        if (layer.beside_norm) {
            norm(pass.beside + token * hidden, layer.attention_norm, hidden, decoder.eps, into(0));
            norm(x, layer.beside_norm, hidden, decoder.eps, into(hidden));
        } else {
            norm(x, layer.attention_norm, hidden, decoder.eps, into(0));
        }
    }
    product(inputs, layer.qkv, wide, pass.tokens);
    if (thread == 0) own.next = omp_get_num_threads();
#pragma omp for schedule(static)
    for (int64_t token = 0; token < pass.tokens; token++) {
        const Row* row = pass.row;
        while (token >= row->first + row->count) row++;
        float* heads = wide + token * layer.qkv.outputs;
        const int64_t position = pass.positions[token], place = row->start + token - row->first;
        for (int64_t head = 0; head < rotated; head++)
            place_head(heads + head * dim, layer.qk_norm ? layer.qk_norm + head * dim : nullptr, layer.cos + position * dim,
                       layer.sin + position * dim, dim, decoder.eps);
        for (int64_t head = 0; head < 2 * shape.kv_heads; head++) {
            void* memory = (void*)row->memory[2 * number + head / shape.kv_heads];
            Number* of_head = (Number*)memory + head % shape.kv_heads * row->head_stride;
            keep<Number>(heads + (shape.heads + head) * dim, of_head, place, dim);
        }
    }
    for (size_t i = thread, next; i < count; i = next) {
        const Item& one = own.items[i];
        next = own.next++;
        queue_item<Number>(ahead, shape, item(next), number, layer.window);
        const float* query = wide + one.row->first * layer.qkv.outputs;
        float* out = found + one.row->first * shape.heads * dim;
        try {
            attend<Number>(ahead, ready, shape, *one.row, number, one.head, one.from, one.to, layer.window, query, layer.qkv.outputs, out);
        } catch (const std::exception&) {
            own.failed = true;
        }
    }
#pragma omp barrier
    const int64_t width = shape.heads * dim;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < pass.tokens; token++) {
        char* row = row_of(inputs, layer.out, token);
        for (int64_t at = 0; at < width; at += LANES)
            to_inputs(some_floats_at(found + token * width + at, width - at), row, at, layer.out.kind);
        end_inputs(row, width, layer.out);
    }
    product(inputs, layer.out, wide, pass.tokens);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < pass.tokens; token++)
        add(pass.x + token * decoder.hidden, wide + token * layer.out.outputs, layer.after_attention, decoder.hidden, decoder.eps);
}

INLINE Floats activated(Floats gate, bool gelu) {
    if (!gelu) return gate / (1.0f + exponential(-gate));
    const Floats inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + hyperbolic_tangent(inner));
}

void feed_forward(const Decoder& decoder, const Pass& pass, int64_t number, Buffers& own) {
    const Layer& layer = decoder.layer[number];
    const int64_t hidden = decoder.hidden;
    float *inputs = own.inputs.numbers.data(), *wide = own.wide.numbers.data(), *found = own.found.numbers.data();
    for (int64_t one = 0; one < layer.feed_forwards; one++) {
        const Weight &gate_up = layer.feed_forward[2 * one], &down = layer.feed_forward[2 * one + 1];
        const int64_t inner = down.inputs;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < pass.tokens; token++) {
            char* row = row_of(inputs, gate_up, token);
            norm(pass.x + token * hidden, layer.mlp_norm, hidden, decoder.eps,
                 [&](int64_t at, Floats some) { to_inputs(some, row, at, gate_up.kind); });
            end_inputs(row, hidden, gate_up);
        }
        product(inputs, gate_up, wide, pass.tokens);
        const int64_t part = 16 * LANES, parts = (inner + part - 1) / part;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < pass.tokens * parts; item++) {
            const int64_t token = item / parts, from = item % parts * part;
            const float *gate = wide + token * gate_up.outputs, *up = gate + down.given;
            for (int64_t at = from; at < std::min(inner, from + part); at += LANES) {
                const Floats opened = activated(some_floats_at(gate + at, down.given - at), decoder.gelu);
                to_inputs(opened * some_floats_at(up + at, down.given - at), row_of(inputs, down, token), at, down.kind);
            }
        }
        product(inputs, down, wide, pass.tokens);
        if (layer.feed_forwards > 1) {
#pragma omp for schedule(static)
            for (int64_t token = 0; token < pass.tokens; token++)
                for (int64_t i = 0; i < hidden; i++) {
                    float& sum = found[token * hidden + i];
                    sum = wide[token * down.outputs + i] + (one ? sum : 0.0f);
                }
        }
    }
    const int64_t stride = layer.feed_forwards > 1 ? hidden : layer.feed_forward[1].outputs;
    const float* fed = layer.feed_forwards > 1 ? found : wide;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < pass.tokens; token++)
        add(pass.x + token * hidden, fed + token * stride, layer.after_mlp, hidden, decoder.eps);
}

// Numbers a token that the buffers hold.
int64_t widest(const Decoder& decoder, int64_t Weight::*size) {
    int64_t most = 0;
    for (int64_t i = 0; i < decoder.layers; i++) {
        const Layer& layer = decoder.layer[i];
        most = std::max({most, layer.qkv.*size, layer.out.*size});
        for (int64_t one = 0; one < 2 * layer.feed_forwards; one++) most = std::max(most, layer.feed_forward[one].*size);
    }
    return most;
}

}  // namespace

extern "C" {

int64_t draftwell_lanes() { return LANES; }

// 0, or 1 where there was not enough memory.
int64_t draftwell_layers(const Decoder* decoder, const Pass* pass) {
    if (!pass->tokens) return 0;
    static thread_local Buffers own_buffers;
    Buffers& own = own_buffers;  // of the thread that calls, shared by its team
    const int64_t tokens = pass->tokens, heads = decoder->shape.heads * decoder->shape.dim, inputs = widest(*decoder, &Weight::inputs);
    try {
        own.inputs.room(tokens * inputs);
        own.wide.room(tokens * widest(*decoder, &Weight::outputs));
        own.found.room(tokens * std::max(heads, decoder->hidden));
        split(*decoder, *pass, own.items);
    } catch (const std::exception&) {
        return 1;
    }
    own.failed = false;
#pragma omp parallel
    {
        if (!make_room(inputs)) own.failed = true;
#pragma omp barrier
        int64_t note = 0;
        for (int64_t number = own.failed ? decoder->layers : 0; number < decoder->layers; number++) {
            while (note < pass->notes && pass->noted[note] == number) {
#pragma omp for schedule(static)
                for (int64_t token = 0; token < tokens; token++)
                    std::copy_n(pass->x + token * decoder->hidden, decoder->hidden,
                                pass->notes_into + (token * pass->notes + note) * decoder->hidden);
                note++;
            }
            if (!pass->skip || !pass->skip[2 * number]) {
                if (decoder->halves) attention<uint16_t>(*decoder, *pass, number, own);
                else attention<float>(*decoder, *pass, number, own);
            }
            if (!pass->skip || !pass->skip[2 * number + 1]) feed_forward(*decoder, *pass, number, own);
        }
    }
    return own.failed;
}

// x [tokens, count] → its RMS norm.
void draftwell_norm(const float* x, const float* weight, float* out, int64_t tokens, int64_t count, float eps) {
    for (int64_t token = 0; token < tokens; token++)
        norm(x + token * count, weight, count, eps, [&](int64_t at, Floats some) { store(out + token * count + at, some, count - at); });
}

// x [tokens, count] → out [tokens, weight->outputs].
int64_t draftwell_product(const float* x, const Weight* weight, float* out, int64_t tokens) {
    if (!tokens) return 0;
    static thread_local Scratch<float> own_inputs;
    float* inputs;
    try {
        inputs = own_inputs.room(tokens * weight->inputs);
    } catch (const std::exception&) {
        return 1;
    }
    const int64_t count = weight->given;
    std::atomic<bool> failed = false;
#pragma omp parallel
    {
        if (!make_room(weight->inputs)) failed = true;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t at = 0; at < weight->inputs; at += LANES)
                to_inputs(some_floats_at(x + token * count + at, count - at), row_of(inputs, *weight, token), at, weight->kind);
        if (!failed) product(inputs, *weight, out, tokens);
    }
    return failed;
}

// Whether products of bfloat16 in 12 bits take less time, of few tokens.
int64_t draftwell_unpacks() { return by_tiles(); }

// Of bfloat16 numbers in 12 bits (twelve_bits.h) the table [16], and the first patch of each block [blocks + 1]; how many patches there are.
int64_t draftwell_choose_table(const uint16_t* numbers, int64_t blocks, int64_t block, uint8_t* table, int64_t* first) {
    choose_table(numbers, blocks, block, table, first);
    return first[blocks];
}

// Writes them.
void draftwell_shorten(const uint16_t* numbers, int64_t blocks, int64_t block, const uint8_t* table, const int64_t* first, char* to, Patch* patches) {
    shorten(numbers, blocks, block, table, first, to, patches);
}

// x [tokens, count], rows [others, count] → out [tokens, others], their dot products.
void draftwell_dots(const float* x, const float* rows, float* out, int64_t tokens, int64_t others, int64_t count) {
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t other = 0; other < others; other++) {
            Floats sum = {};
            for (int64_t at = 0; at < count; at += LANES)
                sum = fused(some_floats_at(x + token * count + at, count - at), some_floats_at(rows + other * count + at, count - at), sum);
            out[token * others + other] = sum_of(sum);
        }
}
}
