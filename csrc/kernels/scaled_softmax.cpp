// softmax(scale * x) of attention's scores, causal or under a mask, of rows of any length. What a
// query does not see gets 0; so does all of a row that sees nothing.
//
// Shapes: rows of K keys, Q of them (queries) a head.
#include "common.h"
#include "exponential.h"

namespace trainkit {
namespace {

// `hidden` (null: nothing) are the keys that are not seen, and `seen` of them come first.
template <class T>
TRAINKIT_CLONES void row_forward(const T* x, const bool* hidden, T* y, int64_t keys, int64_t seen,
                                 double given_scale) {
    using A = Wide<T>;
    const A lowest = -std::numeric_limits<A>::infinity();
    const A scale = A(given_scale);
    A highest = lowest;
    A poison = 0;  // NaN where there is one: a maximum forgets it
    for (int64_t i = 0; i < seen; ++i) {
        const A value = hidden && hidden[i] ? lowest : scale * widen(x[i]);
        highest = value > highest ? value : highest;
        poison += value != value ? value : A(0);
    }
    const bool nothing =
        hidden ? std::all_of(hidden, hidden + seen, [](bool h) { return h; }) : seen == 0;
    if (highest == lowest && !nothing) {
        poison = std::numeric_limits<A>::quiet_NaN();  // scores that are all -inf, as in torch
    }
    const A shift = (highest == lowest ? A(0) : highest) + poison;
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < seen; ++i) {
        const A value = hidden && hidden[i] ? lowest : scale * widen(x[i]);
        sum += exponential(value - shift);
    }
    const A inverse = A(1) / (sum == 0 ? A(1) : sum);
#pragma omp simd
    for (int64_t i = 0; i < seen; ++i) {
        const A value = hidden && hidden[i] ? lowest : scale * widen(x[i]);
        y[i] = narrow<T>(exponential(value - shift) * inverse);
    }
    if (poison != poison && hidden) {
        for (int64_t i = 0; i < seen; ++i) {
            y[i] = hidden[i] ? T{} : y[i];
        }
    }
    std::fill(y + seen, y + keys, T{});
}

template <class T>
TRAINKIT_CLONES void backward(const T* dy, const T* y, T* dx, int64_t keys, double scale,
                              int64_t begin, int64_t end) {
    using A = Wide<T>;
    for (int64_t row = begin; row < end; ++row) {
        const T* d = dy + row * keys;
        const T* p = y + row * keys;
        T* out = dx + row * keys;
        A dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < keys; ++i) {
            dot += widen(d[i]) * widen(p[i]);
        }
#pragma omp simd
        for (int64_t i = 0; i < keys; ++i) {
            out[i] = narrow<T>(A(scale) * widen(p[i]) * (widen(d[i]) - dot));
        }
    }
}

Tensor scaled_causal_softmax(const Tensor& given, double scale) {
    STD_TORCH_CHECK(given.dim() >= 2, "trainkit::scaled_causal_softmax: scores have ", given.dim(),
                    " dimensions, not 2 or more");
    const Tensor x = packed(given);
    const Tensor y = torch::stable::empty_like(x);
    const Rows rows(x);
    const int64_t keys = rows.width;
    const int64_t queries = x.size(x.dim() - 2);
    for_type(x.scalar_type(), "scaled_causal_softmax", [&](auto element) {
        using T = decltype(element);
        parallel_rows(rows.count, keys, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const int64_t seen = keys - queries + row % queries + 1;
                row_forward(data<T>(x) + row * keys, nullptr, mutable_data<T>(y) + row * keys, keys,
                            std::max<int64_t>(0, seen), scale);
            }
        });
    });
    return y;
}

// The mask has x's shape, by strides of 0 where it was expanded to it.
Tensor scaled_masked_softmax(const Tensor& given, const Tensor& given_mask, double scale) {
    STD_TORCH_CHECK(given_mask.scalar_type() == ScalarType::Bool,
                    "trainkit::scaled_masked_softmax: the mask is torch.",
                    toString(given_mask.scalar_type()), ", not torch.bool");
    check_same_shape(given, given_mask, "scaled_masked_softmax");
    const Tensor x = packed(given);
    const Tensor mask = packed(given_mask);
    const Tensor y = torch::stable::empty_like(x);
    const Rows rows(x);
    const int64_t keys = rows.width;
    for_type(x.scalar_type(), "scaled_masked_softmax", [&](auto element) {
        using T = decltype(element);
        parallel_rows(rows.count, keys, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                row_forward(data<T>(x) + row * keys, data<bool>(mask) + row * keys,
                            mutable_data<T>(y) + row * keys, keys, keys, scale);
            }
        });
    });
    return y;
}

Tensor scaled_softmax_backward(const Tensor& given_dy, const Tensor& given, double scale) {
    const Tensor dy = packed(given_dy);
    const Tensor y = packed(given);
    check_alike(dy, y, "scaled_softmax_backward");
    const Tensor dx = torch::stable::empty_like(y);
    const Rows rows(y);
    for_type(y.scalar_type(), "scaled_softmax_backward", [&](auto element) {
        using T = decltype(element);
        parallel_rows(rows.count, rows.width, [&](int64_t begin, int64_t end) {
            backward(data<T>(dy), data<T>(y), mutable_data<T>(dx), rows.width, scale, begin, end);
        });
    });
    return dx;
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("scaled_causal_softmax", TORCH_BOX(&scaled_causal_softmax));
    m.impl("scaled_masked_softmax", TORCH_BOX(&scaled_masked_softmax));
    m.impl("scaled_softmax_backward", TORCH_BOX(&scaled_softmax_backward));
}
}  // namespace
}  // namespace trainkit
