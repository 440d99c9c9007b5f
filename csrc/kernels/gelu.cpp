// gelu(x) and gelu(x + bias), exact or by tanh; backward computes the activation again.
#include "activations.h"

namespace trainkit {
namespace {

// `bias` is a row, or null.
template <class Act, bool kBias, class T, class W>
TRAINKIT_CLONES void forward(const T* x, const W* bias, T* y, int64_t width, int64_t begin,
                             int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* from = x + row * width;
        T* to = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            Wide<T> v = widen(from[i]);
            if constexpr (kBias) {
                v += Wide<T>(widen(bias[i]));
            }
            to[i] = narrow<T>(v * Act::at(v).share);
        }
    }
}

template <class Act, bool kBias, class T, class W>
TRAINKIT_CLONES void backward(const T* dy, const T* x, const W* bias, T* dx, Wide<T>* dbias,
                              int64_t width, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* d = dy + row * width;
        const T* from = x + row * width;
        T* to = dx + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            Wide<T> v = widen(from[i]);
            if constexpr (kBias) {
                v += Wide<T>(widen(bias[i]));
            }
            const Wide<T> gradient = widen(d[i]) * Act::at(v).slope;
            to[i] = narrow<T>(gradient);
            if constexpr (kBias) {
                dbias[i] += gradient;
            }
        }
    }
}

Tensor gelu(const Tensor& given, const std::string& approximate) {
    const Tensor x = packed(given);
    const Tensor y = torch::stable::empty_like(x);
    for_type(x.scalar_type(), "gelu", [&](auto element) {
        using T = decltype(element);
        for_gelu(approximate, "gelu", [&](auto act) {
            // a part of the elements is a row
            parallel_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
                forward<decltype(act), false, T, T>(data<T>(x) + begin, nullptr,
                                                    mutable_data<T>(y) + begin, end - begin, 0, 1);
            });
        });
    });
    return y;
}

Tensor gelu_backward(const Tensor& given_dy, const Tensor& given, const std::string& approximate) {
    const Tensor dy = packed(given_dy);
    const Tensor x = packed(given);
    check_alike(dy, x, "gelu_backward");
    const Tensor dx = torch::stable::empty_like(x);
    for_type(x.scalar_type(), "gelu_backward", [&](auto element) {
        using T = decltype(element);
        for_gelu(approximate, "gelu_backward", [&](auto act) {
            parallel_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
                backward<decltype(act), false, T, T>(data<T>(dy) + begin, data<T>(x) + begin,
                                                     nullptr, mutable_data<T>(dx) + begin, nullptr,
                                                     end - begin, 0, 1);
            });
        });
    });
    return dx;
}

Tensor bias_gelu(const Tensor& given, const Tensor& given_bias, const std::string& approximate) {
    const Tensor x = packed(given);
    const Tensor bias = packed(given_bias);
    const Rows rows(x);
    check_weight(bias, rows.width, "bias_gelu");
    const Tensor y = torch::stable::empty_like(x);
    for_types(x.scalar_type(), bias.scalar_type(), "bias_gelu", [&](auto element, auto added) {
        using T = decltype(element);
        using W = decltype(added);
        for_gelu(approximate, "bias_gelu", [&](auto act) {
            parallel_rows(rows.count, rows.width, [&](int64_t begin, int64_t end) {
                forward<decltype(act), true>(data<T>(x), data<W>(bias), mutable_data<T>(y),
                                             rows.width, begin, end);
            });
        });
    });
    return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& given_dy, const Tensor& given,
                                              const Tensor& given_bias,
                                              const std::string& approximate) {
    const Tensor dy = packed(given_dy);
    const Tensor x = packed(given);
    const Tensor bias = packed(given_bias);
    const Rows rows(x);
    check_alike(dy, x, "bias_gelu_backward");
    check_weight(bias, rows.width, "bias_gelu_backward");
    const Tensor dx = torch::stable::empty_like(x);
    const Tensor dbias = torch::stable::empty_like(bias);
    const int64_t blocks = row_blocks(rows.count);
    const Tensor partial = torch::stable::new_empty(x, {blocks, rows.width}, wide_type(x));
    for_types(
        x.scalar_type(), bias.scalar_type(), "bias_gelu_backward", [&](auto element, auto added) {
            using T = decltype(element);
            using W = decltype(added);
            Wide<T>* sums = mutable_data<Wide<T>>(partial);
            for_gelu(approximate, "bias_gelu_backward", [&](auto act) {
                for_blocks(blocks, rows.count, [&](int64_t block, int64_t begin, int64_t end) {
                    Wide<T>* own = sums + block * rows.width;
                    std::fill_n(own, rows.width, Wide<T>(0));
                    backward<decltype(act), true>(data<T>(dy), data<T>(x), data<W>(bias),
                                                  mutable_data<T>(dx), own, rows.width, begin, end);
                });
            });
            sum_blocks(sums, blocks, rows.width, mutable_data<W>(dbias));
        });
    return {dx, dbias};
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("gelu", TORCH_BOX(&gelu));
    m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
    m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
    m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}
}  // namespace
}  // namespace trainkit
