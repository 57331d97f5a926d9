/* A GGUF file's blocks laid out for the kernels (kernels.h says how), and read back. Nothing is rounded. */
#include "internal.h"

/* A block of the file, taken apart: codes without sign, bytes of scales and minimums where they are bytes. */
typedef struct {
    uint8_t codes[256], scales[16], least[16];
    uint16_t step, step_of_least; /* 16-bit floats */
} Parts;

static uint16_t half_at(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

static void nibbles(const uint8_t *at, int count, uint8_t *codes) {
    for (int i = 0; i < count; i++) codes[i] = at[i] & 15, codes[count + i] = at[i] >> 4;
}

/* The eight scales and minimums of 6 bits in 12 bytes of Q4_K and Q5_K. */
static void six_bits(const uint8_t *at, Parts *out) {
    for (int i = 0; i < 4; i++) {
        out->scales[i] = at[i] & 63, out->least[i] = at[4 + i] & 63;
        out->scales[4 + i] = (at[8 + i] & 15) | (at[i] >> 6 << 4);
        out->least[4 + i] = (at[8 + i] >> 4) | (at[4 + i] >> 6 << 4);
    }
}

static void read_small(enum Type type, const uint8_t *at, Parts *out) {
    const int minimum = SHAPES[type].minimum, fifth = type == Q5_0 || type == Q5_1;
    out->step = half_at(at);
    at += 2;
    if (minimum) out->step_of_least = half_at(at), at += 2;
    if (type == Q8_0) {
        for (int i = 0; i < 32; i++) out->codes[i] = at[i] ^ 128;
        return;
    }
    uint32_t high = 0;
    if (fifth) memcpy(&high, at, sizeof high), at += 4;
    nibbles(at, 16, out->codes);
    for (int i = 0; fifth && i < 32; i++) out->codes[i] |= (high >> i & 1) << 4;
}

static void read_q2_k(const uint8_t *at, Parts *out) {
    memcpy(out->scales, at, 16);
    for (int i = 0; i < 256; i++) out->codes[i] = at[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    out->step = half_at(at + 80), out->step_of_least = half_at(at + 82);
}

static void read_q3_k(const uint8_t *at, Parts *out) {
    const uint8_t *low = at + 32, *six = at + 96;
    for (int i = 0; i < 256; i++)
        out->codes[i] = (low[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) | (at[i % 32] >> (i / 32) & 1) << 2;
    for (int i = 0; i < 16; i++) {
        int four = i < 8 ? six[i] & 15 : six[i - 8] >> 4, two = six[8 + i % 4] >> (i / 4 * 2) & 3;
        out->scales[i] = (uint8_t)((four | two << 4) - 32);
    }
    out->step = half_at(at + 108);
}

static void read_q45_k(enum Type type, const uint8_t *at, Parts *out) {
    out->step = half_at(at), out->step_of_least = half_at(at + 2);
    six_bits(at + 4, out);
    const uint8_t *high = at + 16, *low = type == Q5_K ? high + 32 : high;
    for (int four = 0; four < 4; four++) nibbles(low + 32 * four, 32, out->codes + 64 * four);
    for (int i = 0; type == Q5_K && i < 256; i++) out->codes[i] |= (high[i % 32] >> (i / 32) & 1) << 4;
}

static void read_q6_k(const uint8_t *at, Parts *out) {
    const uint8_t *high = at + 128;
    for (int half = 0; half < 2; half++) {
        nibbles(at + 64 * half, 64, out->codes + 128 * half);
        for (int i = 0; i < 128; i++)
            out->codes[128 * half + i] |= (high[32 * half + i % 32] >> (i / 32 * 2) & 3) << 4;
    }
    memcpy(out->scales, at + 192, 16);
    out->step = half_at(at + 208);
}

static void read_iq4_xs(const uint8_t *at, Parts *out) {
    const uint16_t high = half_at(at + 2);
    out->step = half_at(at);
    for (int i = 0; i < 8; i++) {
        int low = at[4 + i / 2] >> (i % 2 * 4) & 15;
        out->scales[i] = (uint8_t)((low | (high >> (2 * i) & 3) << 4) - 32);
        nibbles(at + 8 + 16 * i, 16, out->codes + 32 * i);
    }
}

static void read_block(enum Type type, const uint8_t *at, Parts *out) {
    switch (type) {
        case Q2_K: read_q2_k(at, out); break;
        case Q3_K: read_q3_k(at, out); break;
        case Q4_K:
        case Q5_K: read_q45_k(type, at, out); break;
        case Q6_K: read_q6_k(at, out); break;
        case IQ4_XS: read_iq4_xs(at, out); break;
        default: read_small(type, at, out);
    }
}

/* -- the kernels' layout ------------------------------------------------------------------------------------------ */

INLINE void put_codes(const Shape *shape, const uint8_t *codes, uint8_t *low, int column) {
    uint8_t *high = low + 64 * shape->low;
    for (int q = 0; q < 8; q++)
        for (int at = 4 * column; at < 4 * column + 4; at++) {
            const uint8_t code = *codes++;
            if (shape->low == 8) low[64 * q + at] = code;
            if (shape->low == 4) low[64 * (q % 4) + at] |= (code & 15) << (q / 4 * 4);
            if (shape->low == 2) low[64 * (q % 2) + at] |= (code & 3) << (q / 2 * 2);
            if (shape->high == 1) high[at] |= (code >> shape->low & 1) << q;
            if (shape->high == 2) high[64 * (q % 2) + at] |= (code >> 4) << (q / 2 * 2);
        }
}

INLINE void put_block(enum Type type, const Parts *parts, uint8_t *to, int column) {
    const Shape *shape = &SHAPES[type];
    const int real = 2 * column, bytes = shape->header ? 1 : 0;
    uint8_t *halves = to;
    memcpy(halves + real, &parts->step, 2);
    if (shape->minimum) memcpy(halves + 2 * COLUMNS + real, &parts->step_of_least, 2);
    to += shape->header;
    for (int group = 0; group < shape->groups; group++, to += shape->size) {
        for (int scale = 0; bytes && scale < shape->scales; scale++)
            to[COLUMNS * scale + column] = parts->scales[group * shape->scales + scale];
        if (bytes && shape->minimum && shape->low == 4) to[COLUMNS + column] = parts->least[group];
        put_codes(shape, parts->codes + GROUP * group, to + shape->head, column);
    }
}

#define PACK(type, ...)                                                        \
    case type:                                                                 \
        for (int64_t at = 0; at < blocks; at++, file += shape->file_bytes) {   \
            read_block(type, file, &parts);                                    \
            put_block(type, &parts, data + at * stride, column);               \
        }                                                                      \
        break;

static void pack_row(enum Type type, const uint8_t *file, int64_t width, uint8_t *data, int column) {
    const Shape *shape = &SHAPES[type];
    const int64_t blocks = width / shape->file_codes, stride = shape->header + shape->groups * shape->size;
    Parts parts;
    switch (type) {
        BLOCK_TYPES(PACK)
        default: break;
    }
}

/* Up to 16 rows of numbers of `bytes` bytes each. */
INLINE void pack_numbers(size_t bytes, const uint8_t *file, int64_t rows, int64_t width, uint8_t *data) {
    for (int64_t at = 0; at < width; at++)
        for (int64_t row = 0; row < rows; row++)
            memcpy(data + (COLUMNS * at + row) * (int64_t)bytes, file + (row * width + at) * (int64_t)bytes, bytes);
}

/* Blocks of 16 columns `first` to `last` of a weight whose rows are `file`; columns after the last row are zeros. */
void pack(int64_t type, const uint8_t *file, int64_t rows, int64_t width, uint8_t *data, int64_t first, int64_t last) {
    const int64_t row_bytes = width / SHAPES[type].file_codes * SHAPES[type].file_bytes, size = block_bytes(type, width);
    memset(data, 0, (size_t)((last - first) * size));
    for (int64_t block = first; !SHAPES[type].low && block < last; block++) {
        const int64_t left = rows - COLUMNS * block, now = left < COLUMNS ? left : COLUMNS;
        const uint8_t *from = file + COLUMNS * block * row_bytes;
        if (type == F32) pack_numbers(4, from, now, width, data + (block - first) * size);
        else pack_numbers(2, from, now, width, data + (block - first) * size);
    }
    for (int64_t row = COLUMNS * first; SHAPES[type].low && row < COLUMNS * last && row < rows; row++)
        pack_row(type, file + row * row_bytes, width, data + (row / COLUMNS - first) * size, row % COLUMNS);
}

int64_t packed_size(int64_t type, int64_t rows, int64_t width) { return blocks_of(rows) * block_bytes(type, width); }

/* -- a row read back ----------------------------------------------------------------------------------------------- */

static float half_float(const uint8_t *at) {
    _Float16 x;
    memcpy(&x, at, sizeof x);
    return (float)x;
}

static int code_at(const Shape *shape, const uint8_t *low, int column, int code) {
    const uint8_t *high = low + 64 * shape->low;
    const int q = code / 4, at = 4 * column + code % 4;
    if (shape->low == 8) return low[64 * q + at];
    int value = shape->low == 4 ? low[64 * (q % 4) + at] >> (q / 4 * 4) & 15 : low[64 * (q % 2) + at] >> (q / 2 * 2) & 3;
    if (shape->high == 1) value |= (high[at] >> q & 1) << shape->low;
    if (shape->high == 2) value |= (high[64 * (q % 2) + at] >> (q / 2 * 2) & 3) << 4;
    return shape->nonlinear ? NONLINEAR[value] + 128 : value;
}

static void read_group(const Shape *shape, const uint8_t *header, const uint8_t *group, int column, float *y) {
    for (int half = 0; half < 2; half++) {
        float scale, least = 0.0f;
        const int nth = shape->scales == 2 ? half : 0;
        if (!shape->header) {
            scale = half_float(group + 2 * column);
            if (shape->minimum) least = half_float(group + 2 * (COLUMNS + column));
        } else {
            const uint8_t byte = group[COLUMNS * nth + column];
            const float step = half_float(header + 2 * column);
            const int both = shape->low == 2 && shape->minimum;
            scale = step * (float)(both ? byte & 15 : (int8_t)byte);
            if (shape->minimum) {
                const int other = both ? byte >> 4 : group[COLUMNS + column];
                least = -(half_float(header + 2 * (COLUMNS + column)) * (float)other);
            }
        }
        for (int code = 16 * half; code < 16 * half + 16; code++) {
            const float value = scale * (float)(code_at(shape, group + shape->head, column, code) - shape->bias);
            *y++ = shape->minimum ? value + least : value;
        }
    }
}

/* Row `index` of a weight as floats. */
void read_row(const Weight *weight, int64_t index, float *y) {
    const Shape *shape = &SHAPES[weight->type];
    const uint8_t *at = weight->data + index / COLUMNS * block_bytes(weight->type, weight->width);
    const int column = (int)(index % COLUMNS);
    if (!shape->low) {
        for (int64_t i = 0; i < weight->width; i++) {
            const uint8_t *value = at + (COLUMNS * i + column) * shape->file_bytes;
            uint32_t bits = 0;
            if (weight->type == F16) {
                y[i] = half_float(value);
                continue;
            }
            memcpy((uint8_t *)&bits + 4 - shape->file_bytes, value, (size_t)shape->file_bytes);
            memcpy(y + i, &bits, sizeof bits);
        }
        return;
    }
    for (int64_t done = 0; done < weight->width;) {
        const uint8_t *header = at;
        at += shape->header;
        for (int group = 0; group < shape->groups; group++, at += shape->size, done += GROUP)
            read_group(shape, header, at, column, y + done);
    }
}
