// LayerNorm (Ba et al. 2016, arXiv:1607.06450), alone and after a residual sum, forward and
// backward. A row comes from memory once and is in the cache when it is looked at again.
//
// With h = (x - mean) r, r = 1 / sqrt(mean((x - mean)^2) + eps): y = h w + b; the gradient dy gives
//   dx = r (dy w - mean(dy w) - h mean(dy w h)),  dw = sum of dy h,  db = sum of dy over rows.
#include "common.h"

namespace trainkit {
namespace {

// What goes through forward; `residual` is added to x, and `sum` is where that goes.
template <class T>
struct Forward {
    const T* x;
    const T* residual;
    const Wide<T>* weight;
    const Wide<T>* bias;
    T* y;
    T* sum;
    Wide<T>* mean;
    Wide<T>* rstd;
    int64_t width;
    double eps;
};

template <bool kAdd, class T>
TRAINKIT_CLONES void forward(const Forward<T>& a, int64_t begin, int64_t end) {
    using A = Wide<T>;
    const int64_t width = a.width;
    const Wide<T>* weight = a.weight;
    const Wide<T>* bias = a.bias;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = a.x + row * width;
        T* y = a.y + row * width;
        A total = 0;
        if constexpr (kAdd) {
            const T* residual = a.residual + row * width;
            T* sum = a.sum + row * width;
#pragma omp simd reduction(+ : total)
            for (int64_t i = 0; i < width; ++i) {
                sum[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
                total += widen(sum[i]);
            }
            x = sum;
        } else {
#pragma omp simd reduction(+ : total)
            for (int64_t i = 0; i < width; ++i) {
                total += widen(x[i]);
            }
        }
        const A mean = total / A(width);
        A squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) {
            const A apart = widen(x[i]) - mean;
            squares += apart * apart;
        }
        const A r = A(1) / std::sqrt(squares / A(width) + A(a.eps));
        a.mean[row] = mean;
        a.rstd[row] = r;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            y[i] = narrow<T>((widen(x[i]) - mean) * r * weight[i] + bias[i]);
        }
    }
}

// What goes through backward; `dsum` is the gradient of the sum itself, which x's takes in.
template <class T>
struct Backward {
    const T* dy;
    const T* dsum;
    const T* x;
    const Wide<T>* weight;
    const Wide<T>* mean;
    const Wide<T>* rstd;
    T* dx;
    int64_t width;
};

template <bool kAdd, class T>
TRAINKIT_CLONES void backward(const Backward<T>& a, Wide<T>* dweight, Wide<T>* dbias, int64_t begin,
                              int64_t end) {
    using A = Wide<T>;
    const int64_t width = a.width;
    const Wide<T>* weight = a.weight;
    std::fill_n(dweight, width, A(0));
    std::fill_n(dbias, width, A(0));
    for (int64_t row = begin; row < end; ++row) {
        const T* x = a.x + row * width;
        const T* dy = a.dy + row * width;
        T* dx = a.dx + row * width;
        const A mean = a.mean[row];
        const A r = a.rstd[row];
        A sum = 0;
        A product = 0;
#pragma omp simd reduction(+ : sum, product)
        for (int64_t i = 0; i < width; ++i) {
            const A gradient = widen(dy[i]);
            const A normed = (widen(x[i]) - mean) * r;
            const A weighted = gradient * weight[i];
            sum += weighted;
            product += weighted * normed;
            dweight[i] += gradient * normed;
            dbias[i] += gradient;
        }
        const A shift = sum / A(width);
        const A shrink = product / A(width);
        if constexpr (kAdd) {
            const T* dsum = a.dsum + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                const A normed = (widen(x[i]) - mean) * r;
                const A own = widen(dy[i]) * weight[i] - shift - normed * shrink;
                dx[i] = narrow<T>(own * r + widen(dsum[i]));
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                const A normed = (widen(x[i]) - mean) * r;
                const A own = widen(dy[i]) * weight[i] - shift - normed * shrink;
                dx[i] = narrow<T>(own * r);
            }
        }
    }
}

template <bool kAdd>
std::tuple<Tensor, Tensor, Tensor, Tensor> run_forward(const char* operation, const Tensor& given,
                                                       const Tensor& other,
                                                       const Tensor& given_weight,
                                                       const Tensor& given_bias, double eps) {
    const Tensor x = packed(given);
    const Tensor residual = packed(other);
    const Tensor weight = widened(given_weight, x, operation);
    const Tensor bias = widened(given_bias, x, operation);
    const Rows rows(x);
    check_alike(x, residual, operation);
    check_weight(weight, rows.width, operation);
    check_weight(bias, rows.width, operation);
    check_same_type(given_weight, given_bias, operation);
    const Tensor y = torch::stable::empty_like(x);
    const Tensor sum = kAdd ? torch::stable::empty_like(x) : y;
    const Tensor mean = torch::stable::new_empty(x, {rows.count}, wide_type(x));
    const Tensor rstd = torch::stable::empty_like(mean);
    for_type(x.scalar_type(), operation, [&](auto element) {
        using T = decltype(element);
        using A = Wide<T>;
        const Forward<T> a{data<T>(x),
                           data<T>(residual),
                           data<Wide<T>>(weight),
                           data<Wide<T>>(bias),
                           mutable_data<T>(y),
                           mutable_data<T>(sum),
                           mutable_data<A>(mean),
                           mutable_data<A>(rstd),
                           rows.width,
                           eps};
        parallel_rows(rows.count, rows.width,
                      [&](int64_t begin, int64_t end) { forward<kAdd>(a, begin, end); });
    });
    return {y, sum, mean, rstd};
}

template <bool kAdd>
std::tuple<Tensor, Tensor, Tensor> run_backward(const char* operation, const Tensor& given_dy,
                                                const Tensor& given_dsum, const Tensor& given_x,
                                                const Tensor& given_weight, const Tensor& mean,
                                                const Tensor& rstd) {
    const Tensor dy = packed(given_dy);
    const Tensor dsum = packed(given_dsum);
    const Tensor x = packed(given_x);
    const Tensor weight = widened(given_weight, x, operation);
    const Rows rows(x);
    check_alike(x, dy, operation);
    check_alike(x, dsum, operation);
    check_weight(weight, rows.width, operation);
    check_statistics(mean, x, rows.count, operation);
    check_statistics(rstd, x, rows.count, operation);
    const Tensor dx = torch::stable::empty_like(x);
    const Tensor dweight = torch::stable::empty_like(weight);
    const Tensor dbias = torch::stable::empty_like(weight);
    const int64_t blocks = row_blocks(rows.count);
    const Tensor partial = torch::stable::new_empty(x, {2, blocks, rows.width}, wide_type(x));
    for_type(x.scalar_type(), operation, [&](auto element) {
        using T = decltype(element);
        using A = Wide<T>;
        const Backward<T> a{data<T>(dy),           data<T>(dsum), data<T>(x),
                            data<Wide<T>>(weight), data<A>(mean), data<A>(rstd),
                            mutable_data<T>(dx),   rows.width};
        A* weights = mutable_data<A>(partial);
        A* biases = weights + blocks * rows.width;
        for_blocks(blocks, rows.count, [&](int64_t block, int64_t begin, int64_t end) {
            const int64_t at = block * rows.width;
            backward<kAdd>(a, weights + at, biases + at, begin, end);
        });
        sum_blocks(weights, blocks, rows.width, mutable_data<A>(dweight));
        sum_blocks(biases, blocks, rows.width, mutable_data<A>(dbias));
    });
    const ScalarType type = given_weight.scalar_type();
    return {dx, torch::stable::to(dweight, type), torch::stable::to(dbias, type)};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight,
                                              const Tensor& bias, double eps) {
    const auto [y, sum, mean, rstd] = run_forward<false>("layer_norm", x, x, weight, bias, eps);
    return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const Tensor& x,
                                                       const Tensor& weight, const Tensor& mean,
                                                       const Tensor& rstd) {
    return run_backward<false>("layer_norm_backward", dy, dy, x, weight, mean, rstd);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          const Tensor& weight, const Tensor& bias,
                                                          double eps) {
    return run_forward<true>("add_layer_norm", x, residual, weight, bias, eps);
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_backward(const Tensor& dy, const Tensor& dsum,
                                                           const Tensor& sum, const Tensor& weight,
                                                           const Tensor& mean, const Tensor& rstd) {
    return run_backward<true>("add_layer_norm_backward", dy, dsum, sum, weight, mean, rstd);
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("layer_norm", TORCH_BOX(&layer_norm));
    m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
    m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
    m.impl("add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
}
}  // namespace
}  // namespace trainkit
