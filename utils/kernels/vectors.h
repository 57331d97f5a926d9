/* Sixteen numbers at a time in the compiler's own vectors, so that every processor runs the same sums in the same order.
   Nothing here knows an instruction set: the compiler splits a vector where its registers are narrower. */
#ifndef VECTORS_H
#define VECTORS_H
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { WIDTH = 16 };

typedef float Reals __attribute__((vector_size(64)));
typedef int32_t Wholes __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef _Float16 Halves __attribute__((vector_size(32)));
typedef float Reals8 __attribute__((vector_size(32)));
typedef float Reals4 __attribute__((vector_size(16)));
typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef uint32_t Bits4 __attribute__((vector_size(16)));

INLINE Reals load(const float *at) { Reals x; memcpy(&x, at, sizeof x); return x; }
INLINE void store(float *at, Reals x) { memcpy(at, &x, sizeof x); }
INLINE Reals splat(float x) { return x - (Reals){0}; }
INLINE Bits bits_of(Reals x) { Bits b; memcpy(&b, &x, sizeof b); return b; }
INLINE Reals reals_of(Bits b) { Reals x; memcpy(&x, &b, sizeof x); return x; }

INLINE Reals load_half(const _Float16 *at) {
    Halves x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(x, Reals);
}

INLINE void store_half(_Float16 *at, Reals x) {
    Halves half = __builtin_convertvector(x, Halves);
    memcpy(at, &half, sizeof half);
}

#if defined(__clang__)
INLINE Reals fma16(Reals a, Reals b, Reals c) { return __builtin_elementwise_fma(a, b, c); }
#else
INLINE Reals fma16(Reals a, Reals b, Reals c) {
    for (int i = 0; i < WIDTH; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

INLINE Reals choose(Wholes condition, Reals a, Reals b) {
    return reals_of(((Bits)condition & bits_of(a)) | (~(Bits)condition & bits_of(b)));
}
/* The larger or smaller of each two; NaN of `a` stays. */
INLINE Reals larger(Reals a, Reals b) { return choose((Wholes)(a < b), b, a); }
INLINE Reals smaller(Reals a, Reals b) { return choose((Wholes)(a > b), b, a); }

/* Each rounded to the nearest integer, ties to even, for magnitudes up to 2^22. */
INLINE Reals nearest(Reals x) {
    const Reals shift = splat(12582912.0f);
    return (x + shift) - shift;
}
INLINE Wholes whole(Reals x) { return __builtin_convertvector(x, Wholes); }

/* The sum of all sixteen, halves added to halves. */
INLINE float total(Reals x) {
    Reals8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    Reals4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The largest of all sixteen. */
INLINE uint32_t most_of(Bits x) {
    Bits8 low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
    Bits8 high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    Bits8 chosen = (Bits8)(low > high), eight = (low & chosen) | (high & ~chosen);
    Bits4 first = __builtin_shufflevector(eight, eight, 0, 1, 2, 3);
    Bits4 second = __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    Bits4 larger = (Bits4)(first > second), four = (first & larger) | (second & ~larger);
    uint32_t a = four[0] > four[1] ? four[0] : four[1], b = four[2] > four[3] ? four[2] : four[3];
    return a > b ? a : b;
}

INLINE Reals8 larger8(Reals8 a, Reals8 b) {
    Bits8 chosen = (Bits8)(a < b);
    return (Reals8)(((Bits8)b & chosen) | ((Bits8)a & ~chosen));
}
INLINE Reals4 larger4(Reals4 a, Reals4 b) {
    Bits4 chosen = (Bits4)(a < b);
    return (Reals4)(((Bits4)b & chosen) | ((Bits4)a & ~chosen));
}
/* The largest of all sixteen, where none is NaN. */
INLINE float largest(Reals x) {
    Reals8 eight = larger8(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
    Reals4 four = larger4(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                          __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
    float a = four[0] < four[1] ? four[1] : four[0], b = four[2] < four[3] ? four[3] : four[2];
    return a < b ? b : a;
}

/* The bits of the largest magnitude. Those of infinity and NaN are larger than any number's. */
INLINE uint32_t greatest_bits(Reals a, Reals b) {
    const Bits magnitude = (Bits){0} + 0x7FFFFFFFu;
    Bits x = bits_of(a) & magnitude, y = bits_of(b) & magnitude, larger = (Bits)(x > y);
    return most_of((x & larger) | (y & ~larger));
}

/* e to the power of each, within two units of the last place, for -87 to 88; clamped beyond; NaN stays. */
INLINE Reals exponential(Reals x) {
    x = smaller(larger(x, splat(-87.0f)), splat(88.0f));
    Reals n = nearest(x * 1.4426950408889634f);
    Reals r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    Reals p = fma16(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r) + 1.0f;
    return p * reals_of(((Bits)whole(n) + 127u) << 23);
}

/* tanh, from e to the power. */
INLINE Reals hyperbolic_tangent(Reals x) {
    return 1.0f - 2.0f / (exponential(x + x) + 1.0f);
}
#endif
