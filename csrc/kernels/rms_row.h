// A row of RMSNorm, forward and backward, for what norms rows of its own: with
// r = 1 / sqrt(mean(x^2) + eps), y = x r w; the gradient dy gives
//   dx = r dy w - x r^3 mean(dy w x),  dw += dy x r.
#pragma once

#include "common.h"

namespace trainkit {

// r of a row.
template <class T>
TRAINKIT_INLINE Wide<T> inverse_rms(const T* x, int64_t width, double eps) {
    using A = Wide<T>;
    A squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) {
        const A value = widen(x[i]);
        squares += value * value;
    }
    return A(1) / std::sqrt(squares / A(width) + A(eps));
}

template <class T>
TRAINKIT_INLINE void scale_row(const T* x, Wide<T> r, const Wide<T>* weight, int64_t width, T* y) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
        y[i] = narrow<T>(widen(x[i]) * r * weight[i]);
    }
}

// Adds to dweight; returns r^3 mean(dy w x).
template <class T>
TRAINKIT_INLINE Wide<T> weigh_row(const T* dy, const T* x, Wide<T> r, const Wide<T>* weight,
                                  int64_t width, Wide<T>* dweight) {
    using A = Wide<T>;
    A product = 0;
#pragma omp simd reduction(+ : product)
    for (int64_t i = 0; i < width; ++i) {
        const A both = widen(dy[i]) * widen(x[i]);
        product += both * weight[i];
        dweight[i] += both * r;
    }
    return product * r * r * r / A(width);
}

// dx may be dy; `shrink` is what weigh_row returned.
template <class T>
TRAINKIT_INLINE void shrink_row(const T* dy, const T* x, Wide<T> r, const Wide<T>* weight,
                                Wide<T> shrink, int64_t width, T* dx) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
        dx[i] = narrow<T>(widen(dy[i]) * r * weight[i] - widen(x[i]) * shrink);
    }
}
}  // namespace trainkit
