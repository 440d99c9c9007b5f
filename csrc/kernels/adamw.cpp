// The optimizer step in two passes over memory: the squared norm of all gradients, then unscaling,
// clipping, AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and the rounded copy that the
// model computes with.
//
// Both cut tensors into blocks of BLOCK elements, whatever the number of threads: the norm's bits
// do not depend on it.
#include "common.h"

namespace trainkit {
namespace {

constexpr int64_t BLOCK = 1 << 16;

// A piece of one of several tensors.
struct Block {
    size_t tensor;
    int64_t start;
    int64_t count;
};

std::vector<Block> blocks_of(const std::vector<Tensor>& tensors) {
    std::vector<Block> blocks;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const int64_t count = tensors[i].numel();
        for (int64_t start = 0; start < count; start += BLOCK) {
            blocks.push_back({i, start, std::min(BLOCK, count - start)});
        }
    }
    return blocks;
}

template <class T>
TRAINKIT_CLONES double squares(const T* x, int64_t count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
        const double value = double(widen(x[i]));
        sum += value * value;
    }
    return sum;
}

// Numbers of one step, alike for all elements of a tensor.
template <class A>
struct Constants {
    A divisor;
    A keep;   // what decay leaves of a weight
    A gain1;  // 1 - beta1, subtracted in fp64: of beta2 near 1 fp32 would keep few digits
    A beta2;
    A gain2;
    A rate;  // learning rate over the first moment's bias correction
    A root;  // of the second moment's
    A eps;
};

// `copy` gets the new weight in C where there is a copy.
template <bool kCopy, class A, class G, class C>
TRAINKIT_CLONES void update(A* weight, const G* gradient, A* average, A* square, C* copy,
                            int64_t count, const Constants<A>& c) {
    const Constants<A> k = c;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const A g = A(widen(gradient[i])) / k.divisor;
        const A m = average[i] + k.gain1 * (g - average[i]);
        const A v = k.beta2 * square[i] + k.gain2 * g * g;
        const A w = weight[i] * k.keep - k.rate * m / (std::sqrt(v) / k.root + k.eps);
        average[i] = m;
        square[i] = v;
        weight[i] = w;
        if constexpr (kCopy) {
            copy[i] = narrow<C>(Wide<C>(w));
        }
    }
}

// Checks that `tensors` are packed and as long as `like`, element for element of one type.
ScalarType type_of(const std::vector<Tensor>& tensors, const std::vector<Tensor>& like,
                   const char* what) {
    STD_TORCH_CHECK(tensors.size() == like.size(), "trainkit::adamw_step_: ", tensors.size(), " ",
                    what, " for ", like.size(), " weights");
    for (size_t i = 0; i < tensors.size(); ++i) {
        STD_TORCH_CHECK(tensors[i].numel() == like[i].numel() && tensors[i].is_contiguous() &&
                            tensors[i].scalar_type() == tensors[0].scalar_type(),
                        "trainkit::adamw_step_: ", what, "[", i,
                        "] must be contiguous, of the weight's size, and all ", what,
                        " of one dtype");
    }
    return tensors[0].scalar_type();
}

// A tensor of one number, of whatever type.
double number(const Tensor& tensor) {
    STD_TORCH_CHECK(tensor.numel() == 1, "trainkit::adamw_step_ takes one number, not ",
                    tensor.numel());
    if (tensor.scalar_type() == ScalarType::Long) {
        return double(*data<int64_t>(tensor));
    }
    double out = 0;
    for_type(tensor.scalar_type(), "adamw_step_",
             [&](auto element) { out = double(widen(*data<decltype(element)>(tensor))); });
    return out;
}

// Element types of weights, gradients and copies; a copy of weights as they are is none.
template <class Body>
void for_update(ScalarType weight, ScalarType gradient, ScalarType copy, const Body& body) {
    const char* name = "adamw_step_";
    STD_TORCH_CHECK(weight == ScalarType::Float || weight == ScalarType::Double, "trainkit::", name,
                    ": weights are fp32 or fp64, not torch.", toString(weight));
    for_type(gradient, name, [&](auto g) {
        for_type(copy, name, [&](auto c) {
            if (weight == ScalarType::Double) {
                body(double{}, g, c);
            } else {
                body(float{}, g, c);
            }
        });
    });
}

Tensor squared_norm(const std::vector<Tensor>& given) {
    std::vector<Tensor> tensors;
    for (const Tensor& tensor : given) {
        tensors.push_back(packed(tensor));
    }
    const std::vector<Block> blocks = blocks_of(tensors);
    std::vector<double> sums(blocks.size());
    torch::stable::parallel_for(0, int64_t(blocks.size()), 1, [&](int64_t begin, int64_t end) {
        for (size_t i = size_t(begin); i < size_t(end); ++i) {
            const Block& block = blocks[i];
            const Tensor& tensor = tensors[block.tensor];
            for_type(tensor.scalar_type(), "squared_norm", [&](auto element) {
                using T = decltype(element);
                sums[i] = squares(data<T>(tensor) + block.start, block.count);
            });
        }
    });
    double sum = 0;
    for (const double part : sums) {
        sum += part;
    }
    const Tensor out = torch::stable::new_empty(given[0], {}, ScalarType::Double);
    *mutable_data<double>(out) = sum;
    return out;
}

void adamw_step(const std::vector<Tensor>& weights, const std::vector<Tensor>& gradients,
                const std::vector<Tensor>& averages, const std::vector<Tensor>& squares,
                const std::vector<Tensor>& copies, const Tensor& steps, const Tensor& rate,
                double beta1, double beta2, double eps, const std::vector<double>& decays,
                const Tensor& divisor, const Tensor& skip) {
    if (weights.empty() || number(skip) != 0) {
        return;
    }
    const ScalarType type = type_of(weights, weights, "weights");
    const ScalarType of_gradients = type_of(gradients, weights, "gradients");
    STD_TORCH_CHECK(type_of(averages, weights, "exp_avgs") == type &&
                        type_of(squares, weights, "exp_avg_sqs") == type &&
                        decays.size() == weights.size(),
                    "trainkit::adamw_step_: moments have the weights' dtype, and there is a decay"
                    " for each weight");
    const ScalarType of_copies = copies.empty() ? type : type_of(copies, weights, "copies");
    const double count = number(steps) + 1;
    const double lr = number(rate);
    const std::vector<Block> blocks = blocks_of(weights);
    for_update(type, of_gradients, of_copies, [&](auto w, auto g, auto c) {
        using A = decltype(w);
        using G = decltype(g);
        using C = decltype(c);
        Constants<A> constants{A(number(divisor)),
                               A(1),
                               A(1 - beta1),
                               A(beta2),
                               A(1 - beta2),
                               A(lr / (1 - std::pow(beta1, count))),
                               A(std::sqrt(1 - std::pow(beta2, count))),
                               A(eps)};
        torch::stable::parallel_for(0, int64_t(blocks.size()), 1, [&](int64_t begin, int64_t end) {
            for (size_t i = size_t(begin); i < size_t(end); ++i) {
                const auto [n, start, length] = blocks[i];
                Constants<A> own = constants;
                own.keep = A(1 - lr * decays[n]);
                A* weight = mutable_data<A>(weights[n]) + start;
                const G* gradient = data<G>(gradients[n]) + start;
                A* average = mutable_data<A>(averages[n]) + start;
                A* square = mutable_data<A>(squares[n]) + start;
                if (copies.empty()) {
                    update<false, A, G, A>(weight, gradient, average, square, nullptr, length, own);
                } else {
                    C* copy = mutable_data<C>(copies[n]) + start;
                    update<true>(weight, gradient, average, square, copy, length, own);
                }
            }
        });
    });
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("squared_norm", TORCH_BOX(&squared_norm));
    m.impl("adamw_step_", TORCH_BOX(&adamw_step));
}
}  // namespace
}  // namespace trainkit
