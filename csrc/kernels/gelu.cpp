// gelu(x) and gelu(x + bias), exact or by tanh; backward computes the activation again.
#include "activations.h"

namespace trainkit {
namespace {

// `bias` is a row, or null.
template <class Act, bool kBias, class T>
TRAINKIT_CLONES void forward(const T* x, const Wide<T>* bias, T* y, int64_t width, int64_t begin,
                             int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* from = x + row * width;
        T* to = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            Wide<T> v = widen(from[i]);
            if constexpr (kBias) {
                v += bias[i];
            }
            to[i] = narrow<T>(v * Act::at(v).share);
        }
    }
}

template <class Act, bool kBias, class T>
TRAINKIT_CLONES void backward(const T* dy, const T* x, const Wide<T>* bias, T* dx, Wide<T>* dbias,
                              int64_t width, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* d = dy + row * width;
        const T* from = x + row * width;
        T* to = dx + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            Wide<T> v = widen(from[i]);
            if constexpr (kBias) {
                v += bias[i];
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
                forward<decltype(act), false, T>(data<T>(x) + begin, nullptr,
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
                backward<decltype(act), false, T>(data<T>(dy) + begin, data<T>(x) + begin, nullptr,
                                                  mutable_data<T>(dx) + begin, nullptr, end - begin,
                                                  0, 1);
            });
        });
    });
    return dx;
}

Tensor bias_gelu(const Tensor& given, const Tensor& given_bias, const std::string& approximate) {
    const Tensor x = packed(given);
    const Tensor bias = widened(given_bias, x, "bias_gelu");
    const Rows rows(x);
    check_weight(bias, rows.width, "bias_gelu");
    const Tensor y = torch::stable::empty_like(x);
    for_type(x.scalar_type(), "bias_gelu", [&](auto element) {
        using T = decltype(element);
        for_gelu(approximate, "bias_gelu", [&](auto act) {
            parallel_rows(rows.count, rows.width, [&](int64_t begin, int64_t end) {
                forward<decltype(act), true>(data<T>(x), data<Wide<T>>(bias), mutable_data<T>(y),
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
    const Tensor bias = widened(given_bias, x, "bias_gelu_backward");
    const Rows rows(x);
    check_alike(dy, x, "bias_gelu_backward");
    check_weight(bias, rows.width, "bias_gelu_backward");
    const Tensor dx = torch::stable::empty_like(x);
    const Tensor dbias = torch::stable::empty_like(bias);
    const int64_t blocks = row_blocks(rows.count);
    const Tensor partial = torch::stable::new_zeros(x, {blocks, rows.width}, wide_type(x));
    for_type(x.scalar_type(), "bias_gelu_backward", [&](auto element) {
        using T = decltype(element);
        Wide<T>* sums = mutable_data<Wide<T>>(partial);
        for_gelu(approximate, "bias_gelu_backward", [&](auto act) {
            for_blocks(blocks, rows.count, [&](int64_t block, int64_t begin, int64_t end) {
                backward<decltype(act), true>(data<T>(dy), data<T>(x), data<Wide<T>>(bias),
                                              mutable_data<T>(dx), sums + block * rows.width,
                                              rows.width, begin, end);
            });
        });
        sum_blocks(sums, blocks, rows.width, mutable_data<Wide<T>>(dbias));
    });
    return {dx, torch::stable::to(dbias, given_bias.scalar_type())};
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("gelu", TORCH_BOX(&gelu));
    m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
    m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
    m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}
}  // namespace
}  // namespace trainkit
