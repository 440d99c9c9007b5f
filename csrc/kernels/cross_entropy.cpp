// Cross-entropy of logits and its gradient, which takes the logits' place. A row comes from memory
// once: it is in the cache when it is looked at for the second and the third time, and e^x is
// computed again rather than kept.
//
// Of a row with the highest logit m and s = sum of e^(x - m), logsum = m + log s:
//   loss = logsum - x[label],
//   d(loss + z logsum^2)/dx = e^(x - m) (1 + 2 z logsum) / s - onehot(label).
#include "exponential.h"

namespace trainkit {
namespace {

constexpr int64_t NO_LABEL = -100;  // trainkit.train.model.head_loss
constexpr int64_t PIECE = 2048;     // elements whose exponentials are added up in fp32

// The largest of a row, -inf of nothing; NaN is passed over: the sum finds it.
template <class T>
TRAINKIT_CLONES Wide<T> highest(const T* row, int64_t width) {
    Wide<T> most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < width; ++i) {
        const Wide<T> value = widen(row[i]);
        most = value > most ? value : most;
    }
    return most;
}

template <class T>
TRAINKIT_CLONES double exponentials(const T* row, int64_t width, Wide<T> shift) {
    double sum = 0;
    for (int64_t start = 0; start < width; start += PIECE) {
        const int64_t stop = std::min(width, start + PIECE);
        Wide<T> piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int64_t i = start; i < stop; ++i) {
            piece += exponential(widen(row[i]) - shift);
        }
        sum += double(piece);
    }
    return sum;
}

// row = e^(row - shift) * factor
template <class T>
TRAINKIT_CLONES void scale_exponentials(T* row, int64_t width, Wide<T> shift, Wide<T> factor) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
        row[i] = narrow<T>(exponential(widen(row[i]) - shift) * factor);
    }
}

// Of the columns that a rank has of one row.
template <class A>
struct Statistics {
    A highest;
    A sum;     // of e^(x - highest); where nothing is above -inf, of e^x
    A target;  // the label's logit, 0 where the label is elsewhere
};

template <class T>
Statistics<Wide<T>> statistics(const T* row, int64_t width, int64_t label) {
    using A = Wide<T>;
    const A most = highest(row, width);
    const A sum = A(exponentials(row, width, most == -INFINITY ? A(0) : most));
    const bool here = label >= 0 && label < width;
    return {most, sum, here ? A(widen(row[label])) : A(0)};
}

// Puts the gradient in a row's place: `softmax` times e^(x - highest), less `hit` at the label.
template <class T>
void gradient(T* row, int64_t width, int64_t columns, int64_t label, Wide<T> highest,
              Wide<T> softmax, Wide<T> hit) {
    using A = Wide<T>;
    const bool here = label >= 0 && label < width;
    const A target = here ? exponential(widen(row[label]) - highest) * softmax - hit : A(0);
    scale_exponentials(row, width, highest, softmax);
    if (here) {
        row[label] = narrow<T>(target);  // rounded once
    }
    std::fill(row + width, row + columns, narrow<T>(A(0)));
}

// A matrix whose rows are packed and lie apart.
struct Matrix {
    int64_t rows;
    int64_t columns;
    int64_t stride;
    Matrix(const Tensor& x, int64_t width, const char* operation) {
        STD_TORCH_CHECK(x.dim() == 2, "trainkit::", operation, " takes a matrix of logits");
        rows = x.size(0);
        columns = x.size(1);
        stride = x.stride(0);
        STD_TORCH_CHECK(width >= 0 && width <= columns, "trainkit::", operation, ": ", width,
                        " columns of ", columns);
        const bool apart = rows <= 1 || stride >= columns;
        STD_TORCH_CHECK((columns <= 1 || x.stride(1) == 1) && apart, "trainkit::", operation,
                        " changes logits in place: the elements of a row must lie one after"
                        " another, and rows must not overlap");
    }
};

const int64_t* labels_of(const Tensor& labels, int64_t rows, const char* operation) {
    STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Long && labels.is_contiguous() &&
                        labels.numel() == rows,
                    "trainkit::", operation, " takes ", rows, " labels of int64 in a row");
    return data<int64_t>(labels);
}

template <class A>
const A* numbers(const Tensor& tensor, int64_t count, const char* operation) {
    const auto type = sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float;
    STD_TORCH_CHECK(
        tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == count,
        "trainkit::", operation, " takes ", count, " numbers of torch.", toString(type));
    return data<A>(tensor);
}

Tensor softmax_loss(const Tensor& logits, const Tensor& labels, int64_t vocab, double z_loss,
                    const Tensor& scale, bool learning) {
    const char* name = "softmax_loss_";
    const Matrix m(logits, vocab, name);
    const int64_t* label = labels_of(labels, m.rows, name);
    for (int64_t row = 0; row < m.rows; ++row) {
        STD_TORCH_CHECK(label[row] == NO_LABEL || (label[row] >= 0 && label[row] < vocab),
                        "trainkit::softmax_loss_: label ", label[row], " of row ", row,
                        " is not one of ", vocab, ", nor ", NO_LABEL, " for none");
    }
    std::vector<double> losses(size_t(m.rows), 0.0);
    for_type(logits.scalar_type(), name, [&](auto element) {
        using T = decltype(element);
        using A = Wide<T>;
        const A factor = numbers<A>(scale, 1, name)[0];
        T* first = mutable_data<T>(logits);
        parallel_rows(m.rows, m.columns, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                T* row = first + i * m.stride;
                const auto found = statistics(row, vocab, label[i]);
                const A logsum = found.highest + std::log(found.sum);
                const bool counted = label[i] != NO_LABEL;
                losses[size_t(i)] = counted ? double(logsum - found.target) : 0.0;
                if (learning) {
                    const A hit = counted ? factor : A(0);
                    const A softmax = hit * (1 + 2 * A(z_loss) * logsum) / found.sum;
                    gradient(row, vocab, m.columns, label[i], found.highest, softmax, hit);
                }
            }
        });
    });
    double sum = 0;
    for (const double loss : losses) {
        sum += loss;
    }
    const Tensor entropy = torch::stable::new_empty(logits, {}, ScalarType::Double);
    *mutable_data<double>(entropy) = sum;
    return entropy;
}

Tensor softmax_statistics(const Tensor& logits, const Tensor& labels, int64_t vocab) {
    const char* name = "softmax_statistics";
    const Matrix m(logits, vocab, name);
    const int64_t* label = labels_of(labels, m.rows, name);
    const auto type =
        logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    const Tensor out = torch::stable::new_empty(logits, {3, m.rows}, type);
    for_type(logits.scalar_type(), name, [&](auto element) {
        using T = decltype(element);
        const T* first = data<T>(logits);
        Wide<T>* found = mutable_data<Wide<T>>(out);
        parallel_rows(m.rows, m.columns, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const auto of_row = statistics(first + i * m.stride, vocab, label[i]);
                found[i] = of_row.highest;
                found[m.rows + i] = of_row.sum;
                found[2 * m.rows + i] = of_row.target;
            }
        });
    });
    return out;
}

void softmax_gradient(const Tensor& logits, const Tensor& labels, int64_t vocab,
                      const Tensor& highest, const Tensor& softmax, const Tensor& hit) {
    const char* name = "softmax_gradient_";
    const Matrix m(logits, vocab, name);
    const int64_t* label = labels_of(labels, m.rows, name);
    for_type(logits.scalar_type(), name, [&](auto element) {
        using T = decltype(element);
        using A = Wide<T>;
        T* first = mutable_data<T>(logits);
        const A* shifts = numbers<A>(highest, m.rows, name);
        const A* factors = numbers<A>(softmax, m.rows, name);
        const A* hits = numbers<A>(hit, m.rows, name);
        parallel_rows(m.rows, m.columns, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                gradient(first + i * m.stride, vocab, m.columns, label[i], shifts[i], factors[i],
                         hits[i]);
            }
        });
    });
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("softmax_loss_", TORCH_BOX(&softmax_loss));
    m.impl("softmax_statistics", TORCH_BOX(&softmax_statistics));
    m.impl("softmax_gradient_", TORCH_BOX(&softmax_gradient));
}
}  // namespace
}  // namespace trainkit
