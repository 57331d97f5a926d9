/* Products of a few rows with packed weights.

   Activations are 16-bit integers with a scale for each group of 32, kept as two bytes (see Codes), so that one
   instruction multiplies four unsigned weight codes by four signed bytes; with AVX2 but not AVX-512 they are kept
   whole, and two codes are multiplied at once. Narrow ones have 8 bits, and a scale for each 16. Integer sums are
   exact, and each row's floats are added group after group whatever else is there: **a row's result depends on the row
   alone**, bit for bit, on every processor. */
#include "internal.h"

#if WORDS || defined(__AVX512VNNI__) /* words: two registers, which share what is read of a row */
#include <immintrin.h>
#define LANES 16
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define LANES 4
#else
#define LANES 4
#endif

typedef uint8_t Octets __attribute__((vector_size(4 * LANES)));
typedef uint16_t Pairs __attribute__((vector_size(4 * LANES)));
typedef int32_t Sums __attribute__((vector_size(4 * LANES)));
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Signed __attribute__((vector_size(LANES)));
typedef uint16_t Words __attribute__((vector_size(2 * LANES)));
typedef uint32_t Doubles __attribute__((vector_size(4 * LANES)));
typedef _Float16 HalfLanes __attribute__((vector_size(2 * LANES)));
#if WORDS
/* 16 columns in two registers, and the unpacked codes of a group. */
typedef union {
    Octets octets;
    Pairs pairs;
    Sums sums;
    __m256i halves[2];
} Both;
typedef Both Kept[16];
#else
typedef int Kept;
#endif

#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

#if LANES == 16
/* The `at`th four bytes of a row. */
INLINE int32_t four_of(const int8_t *row, int at) { int32_t four; memcpy(&four, row + 4 * at, sizeof four); return four; }
#endif

#if !WORDS
/* -- the innermost products, for each kind of processor ------------------------------------------------------ */

/* `hold` loads a row's bytes for quad `q`; `dot` adds each column's four codes times these to `sums`. `bits` of a code:
   8-bit ones are biased by 128. */
#if LANES == 16
typedef int32_t Held;
INLINE void hold(Held *held, const int8_t *row, int q) { *held = four_of(row, q); }
INLINE Sums dot(Sums sums, Octets codes, Held held, int q, int bits) {
    (void)q, (void)bits;
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(held));
}
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int8x16_t Held; /* for four quads */
INLINE void hold(Held *held, const int8_t *row, int q) {
    if (q % 4) return;
    *held = vld1q_s8(row + 4 * q);
    __asm__("" : "+w"(*held)); /* else the compiler reads each four bytes again */
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define BY_LANE(lane) (Sums)vusdotq_laneq_s32((int32x4_t)sums, (uint8x16_t)codes, held, lane)
#else
#define BY_LANE(lane) (Sums)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)codes, held, lane)
#endif
INLINE Sums dot(Sums sums, Octets codes, Held held, int q, int bits) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    (void)bits;
#else
    if (bits == 8) codes ^= 128; /* signed, see bias_of */
#endif
    return q % 4 == 0 ? BY_LANE(0) : q % 4 == 1 ? BY_LANE(1) : q % 4 == 2 ? BY_LANE(2) : BY_LANE(3);
}
#else
typedef const int8_t *Held;
INLINE void hold(Held *held, const int8_t *row, int q) { *held = row + 4 * q; }
INLINE Sums dot(Sums sums, Octets codes, Held held, int q, int bits) {
    (void)q, (void)bits;
    for (int lane = 0; lane < LANES; lane++)
        for (int at = 0; at < 4; at++) sums[lane] += (int32_t)codes[4 * lane + at] * held[at];
    return sums;
}
#endif

/* The number that was added to every code so that none is negative, in the codes that `dot` takes. */
INLINE int32_t bias_of(const Shape *shape) {
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
    if (shape->bits == 8) return 0;
#endif
    return shape->bias;
}
#endif

INLINE Lanes fused(Lanes a, Lanes b, Lanes c) {
#if defined(__clang__)
    return __builtin_elementwise_fma(a, b, c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* -- codes of a group -------------------------------------------------------------------------------------------- */

INLINE Pairs line(const uint8_t *at) { Pairs x; memcpy(&x, at, sizeof x); return x; }
INLINE Pairs shifted(Pairs x, int by) { return by >= 0 ? x << by : x >> -by; } /* negative: to the right */
INLINE Octets masked(Pairs x, int mask) { return (Octets)(x & (uint16_t)(mask * 257)); }

INLINE Octets nonlinear(Octets codes) {
#if WORDS
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)NONLINEAR));
    Both both = {codes};
    for (int half = 0; half < 2; half++) both.halves[half] = _mm256_shuffle_epi8(table, both.halves[half]);
    return both.octets + 128;
#elif LANES == 16
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)NONLINEAR));
    return (Octets)_mm512_shuffle_epi8(table, (__m512i)codes) + 128;
#elif defined(__ARM_NEON)
    return (Octets)vqtbl1q_s8(vld1q_s8(NONLINEAR), (uint8x16_t)codes) + 128;
#else
    for (int i = 0; i < 4 * LANES; i++) codes[i] = (uint8_t)(NONLINEAR[codes[i]] + 128);
    return codes;
#endif
}

/* Quad q of LANES columns, whose lines begin at `low`. */
INLINE Octets quad(const Shape *shape, const uint8_t *low, int q) {
    const uint8_t *high = low + 64 * shape->low;
    Octets codes = {0};
    if (shape->low == 8) codes = (Octets)line(low + 64 * q);
    if (shape->low == 4) codes = masked(shifted(line(low + 64 * (q % 4)), q < 4 ? 0 : -4), 15);
    if (shape->low == 2) codes = masked(shifted(line(low + 64 * (q % 2)), -(q / 2 * 2)), 3);
    if (shape->high == 1) codes |= masked(shifted(line(high), shape->low - q), 1 << shape->low);
    if (shape->high == 2) codes |= masked(shifted(line(high + 64 * (q % 2)), 4 - q / 2 * 2), 3 << 4);
    return shape->nonlinear ? nonlinear(codes) : codes;
}

INLINE Lanes halves(const uint8_t *at) {
    HalfLanes x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(x, Lanes);
}
INLINE Lanes signed_bytes(const uint8_t *at) {
    Signed x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(x, Lanes);
}

/* Scales and minimums of LANES columns: of 32 codes, or of twice 16. */
INLINE void scales_of(const Shape *shape, const uint8_t *header, const uint8_t *group, Lanes scales[2], Lanes least[2]) {
    if (!shape->header) {
        scales[0] = halves(group);
        if (shape->minimum) least[0] = halves(group + 2 * COLUMNS);
        return;
    }
    Lanes step = halves(header), step_of_least = {0};
    if (shape->minimum) step_of_least = halves(header + 2 * COLUMNS);
    for (int half = 0; half < shape->scales; half++) {
        if (shape->low == 2 && shape->minimum) { /* four bits each in one byte */
            Bytes both;
            memcpy(&both, group + COLUMNS * half, sizeof both);
            scales[half] = step * __builtin_convertvector(both & 15, Lanes);
            least[half] = -(step_of_least * __builtin_convertvector(both >> 4, Lanes));
        } else {
            scales[half] = step * signed_bytes(group + COLUMNS * half);
            if (shape->minimum) least[half] = -(step_of_least * signed_bytes(group + COLUMNS * (shape->scales + half)));
        }
    }
}

/* -- tiles ------------------------------------------------------------------------------------------------------- */

#if defined(__ARM_FEATURE_MATMUL_INT8)
/* The sums of two rows in one: a matrix of two columns by eight codes times one of eight bytes by two rows. */
INLINE void two_rows(const Octets quads[8], int narrow, const Codes *x, int from, int to, Sums sums[2]) {
    int32x4_t left = vdupq_n_s32(0), right = left; /* columns 0 and 1, columns 2 and 3 */
    for (int low = 0; low < 2 - narrow; low++) {
        left = vshlq_n_s32(left, 8), right = vshlq_n_s32(right, 8);
        UNROLLED for (int q = from; q < to; q += 2) {
            const uint32x4_t codes = (uint32x4_t)quads[q], next = (uint32x4_t)quads[q + 1];
            const int8x16_t bytes = vcombine_s8(vld1_s8((low ? x[0].low : x[0].high) + 4 * q),
                                                vld1_s8((low ? x[1].low : x[1].high) + 4 * q));
            left = vusmmlaq_s32(left, vreinterpretq_u8_u32(vzip1q_u32(codes, next)), bytes);
            right = vusmmlaq_s32(right, vreinterpretq_u8_u32(vzip2q_u32(codes, next)), bytes);
        }
    }
    sums[0] = (Sums)vuzp1q_s32(left, right);
    sums[1] = (Sums)vuzp2q_s32(left, right);
}
#endif

#if WORDS
/* Keep sums in registers and in this order: else the compiler reorders all rows and leaves no registers to sums. */
INLINE void in_order(Both *sums) { __asm__ volatile("" : "+x"(sums->halves[0]), "+x"(sums->halves[1])); }

/* Sums += two words of each column times two of a row. */
INLINE void add_words(Both *sums, Both codes, int32_t two) {
    const __m256i by = _mm256_set1_epi32(two);
    for (int half = 0; half < 2; half++)
#if defined(__AVXVNNI__)
        sums->halves[half] = _mm256_dpwssd_avx_epi32(sums->halves[half], codes.halves[half], by);
#else
        sums->halves[half] = _mm256_add_epi32(sums->halves[half], _mm256_madd_epi16(codes.halves[half], by));
#endif
    in_order(sums);
}

/* Sums += four bytes of each column times four of a row. Without an instruction for that products are added in 16 bits,
   in `pairs`, from a quad that is `first` to one that is `last`; with `signs` they are of the codes less their bias. */
#if defined(__AVXVNNI__)
enum { VNNI = 1 };
INLINE void add_bytes(Both *sums, Both *pairs, Both codes, int32_t four, int signs, int bias, int first, int last) {
    (void)pairs, (void)signs, (void)bias, (void)first, (void)last;
    for (int half = 0; half < 2; half++)
        sums->halves[half] = _mm256_dpbusd_avx_epi32(sums->halves[half], codes.halves[half], _mm256_set1_epi32(four));
    in_order(sums);
}
#else
enum { VNNI = 0 };
INLINE void add_bytes(Both *sums, Both *pairs, Both codes, int32_t four, int signs, int bias, int first, int last) {
    const __m256i by = _mm256_set1_epi32(four);
    for (int half = 0; half < 2; half++) {
        const __m256i code = codes.halves[half], offset = _mm256_sub_epi8(code, _mm256_set1_epi8((char)bias));
        const __m256i two = signs ? _mm256_maddubs_epi16(_mm256_abs_epi8(offset), _mm256_sign_epi8(by, offset))
                                  : _mm256_maddubs_epi16(code, by);
        pairs->halves[half] = first ? two : _mm256_add_epi16(pairs->halves[half], two);
    }
    if (!first) in_order(pairs);
    if (last) add_words(sums, *pairs, 0x10001);
}
#endif

/* Every second code of a quad in words, from code `word` on, less `bias`. */
INLINE Both word_of(Octets codes, int word, int bias) {
    return (Both){.pairs = (word ? (Pairs)codes >> 8 : (Pairs)codes & 255) - (uint16_t)bias};
}

/* Σ weight code · activation code over quads `from` to `to`, exact. Of 16-bit activations two of every column are
   multiplied at once. Without AVX-VNNI products of 8-bit ones are added in 16 bits, as many as cannot overflow.
   Unpacked codes are stored in `kept`, unless it is NULL; with `again` they are read from there. */
INLINE void exact(const Shape *shape, int narrow, const uint8_t *lines, Kept *kept, int again, const Codes *x, int from,
                  int to, int rows, Sums whole[TILE]) {
    const int signs = narrow ? shape->bits == 8 && !VNNI : (again || rows > 2) && shape->bias; /* codes without their bias */
    const int most = shape->bits <= 4 ? 8 : shape->bits == 5 ? 4 : shape->bits == 6 ? 2 : 1;
    const int32_t bias = signs ? 0 : shape->bias;
    const int chains = VNNI && rows <= 2 && !narrow && to - from == 8 ? 2 : 1; /* of sums that wait for each other */
    Both sums[TILE][2], pairs[TILE];
    for (int row = 0; row < rows; row++) sums[row][0].sums = sums[row][1].sums = (Sums){0};
    UNROLLED for (int q = from; q < to; q++) {
        __asm__ volatile("" : "+r"(lines)); /* else all quads are unpacked first */
        const Octets codes = again ? (*kept)[q].octets : quad(shape, lines, q);
        if (narrow && kept) (*kept)[q].octets = codes;
        UNROLLED for (int word = 0; word < 2 && !narrow; word++) {
            const Both two = again ? (*kept)[2 * q + word] : word_of(codes, word, signs ? shape->bias : 0);
            if (kept) (*kept)[2 * q + word] = two;
            UNROLLED for (int row = 0; row < rows; row++)
                add_words(&sums[row][word % chains], two, four_of(x[row].high, 2 * q + word));
        }
        UNROLLED for (int row = 0; row < rows && narrow; row++)
            add_bytes(&sums[row][0], &pairs[row], (Both){codes}, four_of(x[row].high, q), signs, shape->bias,
                      (q - from) % most == 0, (q - from) % most == most - 1 || q == to - 1);
    }
    for (int row = 0; row < rows; row++) {
        whole[row] = sums[row][0].sums + sums[row][1].sums;
        if (bias) whole[row] -= bias * ((from == 0 ? x[row].count[0] : 0) + (to == 8 ? x[row].count[1] : 0));
    }
}
#else
/* Σ weight code · activation code over quads `from` to `to`, exact. The rows' chains of sums run beside each other: of
   one or two rows two chains each, of more one. */
INLINE void exact(const Shape *shape, int narrow, const uint8_t *lines, Kept *kept, int again, const Codes *x, int from,
                  int to, int rows, Sums whole[TILE]) {
    (void)kept, (void)again;
    const int32_t bias = bias_of(shape), two = rows <= 2 && !narrow;
    Octets quads[8];
    for (int q = from; q < to; q++) quads[q] = quad(shape, lines, q);
    Sums low[TILE];
    Held held[TILE], held_low[TILE];
    int first = 0; /* the first row that is multiplied by itself */
#if defined(__ARM_FEATURE_MATMUL_INT8)
    for (; first + 1 < rows; first += 2) two_rows(quads, narrow, x + first, from, to, whole + first);
#endif
    for (int row = first; row < rows; row++) whole[row] = low[row] = (Sums){0};
    UNROLLED for (int q = from; q < to; q++)
        UNROLLED for (int row = first; row < rows; row++) {
            hold(&held[row], x[row].high, q), hold(&held_low[row], x[row].low, q);
            whole[row] = dot(whole[row], quads[q], held[row], q, shape->bits);
            if (two) low[row] = dot(low[row], quads[q], held_low[row], q, shape->bits);
        }
    for (int row = first; row < rows && !narrow; row++) whole[row] = two ? (whole[row] << 8) + low[row] : whole[row] << 8;
    UNROLLED for (int q = from; q < to && !two && !narrow; q++)
        UNROLLED for (int row = first; row < rows; row++) {
            hold(&held[row], x[row].low, q);
            whole[row] = dot(whole[row], quads[q], held[row], q, shape->bits);
        }
    for (int row = 0; row < rows && bias; row++)
        whole[row] -= bias * ((from == 0 ? x[row].count[0] : 0) + (to == 8 ? x[row].count[1] : 0));
}

#endif

/* One group added to the running sums of a few rows. */
INLINE void add_rows(const Shape *shape, int narrow, const uint8_t *lines, Kept *kept, int again, const Lanes scales[2],
                     const Lanes least[2], const Codes *x, Lanes *sums, int rows) {
    const int two = shape->scales == 2;
    const Lanes none = {0};
    Sums first[TILE], second[TILE];
    exact(shape, narrow, lines, kept, again, x, 0, two || narrow ? 4 : 8, rows, first);
    if (narrow != two && !(two && shape->minimum)) { /* the halves have a scale in common, which comes last */
        exact(shape, narrow, lines, kept, again, x, 4, 8, rows, second);
        for (int row = 0; row < rows; row++) {
            const float *own = x[row].scale;
            Lanes sum = __builtin_convertvector(first[row], Lanes) * (two ? scales[0] : own[0] - none);
            sum = fused(__builtin_convertvector(second[row], Lanes), two ? scales[1] : own[1] - none, sum);
            sums[row] = fused(sum, two ? own[0] - none : scales[0], sums[row]);
            if (shape->minimum) sums[row] = fused(least[0], x[row].sum - none, sums[row]);
        }
        return;
    }
    for (int half = 0; half < shape->scales; half++) {
        if (half == 1) exact(shape, narrow, lines, kept, again, x, 4, 8, rows, first);
        for (int row = 0; row < rows; row++) {
            const float by = x[row].scale[half];
            const float count = two ? (float)x[row].count[half] * by : x[row].sum;
            Lanes sum = __builtin_convertvector(first[row], Lanes) * by;
            sums[row] = fused(sum, scales[half], sums[row]);
            if (shape->minimum) sums[row] = fused(least[half], count - none, sums[row]);
        }
    }
}

/* One group added to the running sums of all rows. */
INLINE void add_group(const Shape *shape, int narrow, const uint8_t *header, const uint8_t *group, int part,
                      const Codes *x, Lanes *sums, int rows) {
    Lanes scales[2], least[2];
    const int offset = LANES * part * (shape->header ? 1 : 2);
    scales_of(shape, header + 2 * LANES * part, group + offset, scales, least);
    const uint8_t *lines = group + shape->head + 4 * LANES * part;
    const int many = rows > 4, wide = shape->high || shape->low == 2; /* measured: docs/notes/passes.md */
    const int step = WORDS ? many ? (rows + 1) / 2 : rows : many && shape->scales == 2 ? TILE : 2;
    Kept kept;
    UNROLLED for (int row = 0; row < rows; row += step) {
        if (WORDS && many && row > 0) __asm__ volatile("" : "+m"(kept)); /* in memory, no registers */
        add_rows(shape, narrow, lines, WORDS && many && wide ? &kept : 0, row > 0 && wide, scales, least, x + row,
                 sums + row, rows - row < step ? rows - row : step);
    }
}

/* 16 columns of the rows of a tile. */
INLINE void tile(const enum Type type, int narrow, const uint8_t *data, const Codes *x, float *y, int64_t groups,
                 int64_t stride, int rows) {
    const Shape *shape = &SHAPES[type];
    for (int part = 0; part < COLUMNS / LANES; part++) {
        const uint8_t *w = data, *header = data;
        const Codes *codes = x;
        Lanes sums[TILE] = {{0}};
        for (int64_t first = 0; first < groups; first += shape->groups) {
            header = w;
            w += shape->header;
            for (int group = 0; group < shape->groups; group++, w += shape->size, codes += rows) {
                if (part == 0) fetch_ahead(w, shape->size);
                add_group(shape, narrow, header, w, part, codes, sums, rows);
            }
        }
        for (int row = 0; row < rows; row++) {
            memcpy(y + row * stride + LANES * part, &sums[row], sizeof(Lanes));
        }
    }
}

#define ROWS_OF(type, count) \
    case count: tile(type, NARROW, data, x, y, groups, stride, count); break;
#define TILE_OF(type, ...)                                                                                   \
    static void tile_##type(const uint8_t *data, const Codes *x, float *y, int64_t groups, int64_t stride,   \
                            int rows) {                                                                      \
        switch (rows) {                                                                                      \
            ROWS_OF(type, 1) ROWS_OF(type, 2) ROWS_OF(type, 3) ROWS_OF(type, 4)                              \
            ROWS_OF(type, 5) ROWS_OF(type, 6) ROWS_OF(type, 7) ROWS_OF(type, 8)                              \
        }                                                                                                    \
    }
#define ENTRY(type, ...) [type] = tile_##type,

/* Compiled twice, for activations of 16 and of 8 bits: -DNARROW=0 and -DNARROW=1. */
BLOCK_TYPES(TILE_OF)
#if NARROW
const Tile NARROW_TILES[TYPES] = {BLOCK_TYPES(ENTRY)};
#else
const Tile TILES[TYPES] = {BLOCK_TYPES(ENTRY)};
#endif
