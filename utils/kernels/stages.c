/* Parts of a pass that a layer and its mixture share: rows normed for a product, and the first half of an MLP. */
#include "internal.h"
#include <math.h>

static float inverse_rms(const float *x, int64_t size, float epsilon) {
    Reals even = splat(0.0f), odd = splat(0.0f);
    for (int64_t at = 0; at < size; at += 2 * WIDTH) {
        even = fma16(load(x + at), load(x + at), even);
        odd = fma16(load(x + at + WIDTH), load(x + at + WIDTH), odd);
    }
    return 1.0f / sqrtf(total(even + odd) / (float)size + epsilon);
}

static Reals normed16(const float *x, const float *weight, float by) {
    return weight ? load(x) * by * load(weight) : load(x);
}

/* One part of a row that has `groups` groups, from group `first` on. */
static void norm_part(const float *x, const float *weight, int64_t size, float epsilon, const Input *to, int64_t row,
                      int64_t rows, int64_t first, int64_t groups, int64_t narrow, float *copy) {
    const float by = weight ? inverse_rms(x, size, epsilon) : 0.0f;
    for (int64_t group = 0; group < size / GROUP; group++) {
        const int64_t at = GROUP * group;
        Reals low = normed16(x + at, weight + (weight ? at : 0), by);
        Reals high = normed16(x + at + WIDTH, weight + (weight ? at + WIDTH : 0), by);
        if (to) put(to, row, rows, first + group, groups, low, high, narrow);
        if (copy) store(copy + at, low), store(copy + at + WIDTH, high);
    }
}

/* Write x / rms(x) · weight, or x if `weight` is NULL, as row `row` of `rows` into `to`, a product's input, and into
   `copy`; either may be NULL. */
void norm_into(const float *x, const float *weight, int64_t size, float epsilon, const Input *to, int64_t row,
               int64_t rows, int64_t narrow, float *copy) {
    norm_part(x, weight, size, epsilon, to, row, rows, 0, size / GROUP, narrow, copy);
}

/* The same of x that has several parts of `size` numbers, each by its own rms. */
void norm_parts(const float *x, const float *weight, int64_t size, int64_t parts, float epsilon, const Input *to,
                int64_t row, int64_t rows) {
    const int64_t groups = size / GROUP;
    for (int64_t part = 0; part < parts; part++)
        norm_part(x + size * part, weight + size * part, size, epsilon, to, row, rows, groups * part, groups * parts, 0, 0);
}

INLINE Reals activated(Reals gate, Reals up, int64_t activation) {
    if (activation == SILU) return gate / (exponential(-gate) + 1.0f) * up;
    Reals inner = (gate + gate * gate * gate * 0.044715f) * 0.7978845608028654f;
    return gate * 0.5f * (hyperbolic_tangent(inner) + 1.0f) * up;
}

/* activation(gate) · up of a group of 32 columns: the input of `down`. */
void gate_up(const Pass *p, const Weight *gate, const Weight *up, const Input *input, const Input *to, int64_t group,
             int64_t rows, const Member *member) {
    float *buffer = p->buffer + member->thread * p->buffer_size;
    for (int64_t start = 0; start < rows; start += TILE) {
        const int64_t now = rows - start < TILE ? rows - start : TILE;
        for (int64_t half = 0; half < 2; half++) {
            columns(gate, 2 * group + half, input, start, now, buffer + WIDTH * half, 4 * WIDTH, p->narrow);
            columns(up, 2 * group + half, input, start, now, buffer + WIDTH * (2 + half), 4 * WIDTH, p->narrow);
        }
        for (int64_t row = 0; row < now; row++) {
            const float *y = buffer + 4 * WIDTH * row;
            put(to, start + row, rows, group, gate->rows / GROUP, activated(load(y), load(y + 2 * WIDTH), p->activation),
                activated(load(y + WIDTH), load(y + 3 * WIDTH), p->activation), p->narrow);
        }
    }
}
