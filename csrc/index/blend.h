// The native blend: which dataset stands at which position, by arithmetic on the position alone.
//
// The datasets are the leaves of a binary tree whose every node sends its samples to two children
// in proportion to their weights. With weights a (left) and b, W = a + b, of the first n samples of
// a node the left child has L(n) = floor(n a / W + 1/2), exactly, and the right child n - L(n). A
// position descends from the root: sample n of a node is sample L(n) of its left child if L(n + 1)
// > L(n), else sample n - L(n) of its right one. At the leaf that number says how many samples the
// dataset gave before. L(n + W) = L(n) + a: after as many positions as the weights' sum every
// dataset has given its weight exactly, so that with sizes for weights no sample is missed or
// doubled.
//
// The tree is Huffman's (D. A. Huffman, "A Method for the Construction of Minimum-Redundancy
// Codes", 1952), the one of least mean depth: below the entropy of the shares, in bits, plus 1. It
// also keeps every dataset within 2 samples of its share at every prefix:
//   Let e be how far a node's count is from its share of the first n positions. A child takes its
//   share s of that error and at most 1/2 more by rounding, so a leaf whose edges have the shares
//   s_1 (the lowest), s_2, .. up to the root is off by at most 1/2 (1 + s_1 + s_1 s_2 + s_1 s_2 s_3
//   + ..), over one edge fewer than there are. Two edges in a row halve a share at least (s_i
//   s_{i+1} <= 1/2): let node X have the children A and B, and A the child A'. When A was made of
//   its two children they were the lightest there were, and B, or a part of it, was there too: A'
//   <= B, and A' <= A, so 2 A' <= A + B = X. So the error stays below 1/2 (1 + 1 + 1/2 + 1/2 + 1/4
//   + 1/4 + ..) = 2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trainkit {

// of all weights together, and of a position: n a + W / 2 fits 128 bits with ease
constexpr std::int64_t kMaxWeight = std::int64_t{1} << 62;
// a dataset's number is an int16, as in Megatron
constexpr std::size_t kMaxDatasets = 32766;

class Blend {
  public:
    // One weight a dataset; 0: never drawn. std::invalid_argument: a negative weight, none above 0,
    // a sum above 2^62, too many datasets.
    Blend(const std::int64_t* weights, std::size_t datasets) : datasets_(datasets) {
        if (datasets > kMaxDatasets) {
            throw std::invalid_argument(std::to_string(datasets) + " datasets, but at most " +
                                        std::to_string(kMaxDatasets) + " can be blended");
        }
        // Lightest first; of equal weight the one made first, so that the tree depends on the
        // weights and their order only. weight, when it was made, node or ~dataset
        using Entry = std::tuple<std::uint64_t, std::size_t, std::int32_t>;
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> lightest;
        std::uint64_t sum = 0;
        for (std::size_t dataset = 0; dataset < datasets; ++dataset) {
            if (weights[dataset] < 0 || weights[dataset] > kMaxWeight ||
                (sum += static_cast<std::uint64_t>(weights[dataset])) > kMaxWeight) {
                throw std::invalid_argument("weight " + std::to_string(weights[dataset]) +
                                            " of dataset " + std::to_string(dataset) +
                                            ": weights are 0 or more and sum to 2**62 or less");
            }
            if (weights[dataset] > 0)
                lightest.emplace(weights[dataset], dataset, ~static_cast<std::int32_t>(dataset));
        }
        if (lightest.empty())
            throw std::invalid_argument("no dataset has a weight above 0");
        while (lightest.size() > 1) {
            const auto [left, left_made, left_node] = lightest.top();
            lightest.pop();
            const auto [right, right_made, right_node] = lightest.top();
            lightest.pop();
            lightest.emplace(left + right, datasets + nodes_.size(),
                             static_cast<std::int32_t>(nodes_.size()));
            nodes_.push_back({left, left + right, {left_node, right_node}});
        }
        root_ = std::get<2>(lightest.top());
    }

    std::size_t datasets() const { return datasets_; }

    // dataset[i], count[i]: the dataset at position start + i and how many samples it gave before;
    // start + n <= kMaxWeight, the caller checks. A node divides once, when it is first met; from
    // then on it counts in steps of 1, as Bresenham's line does.
    void at(std::uint64_t start, std::size_t n, std::int16_t* dataset, std::int64_t* count) const {
        std::vector<Split> splits(nodes_.size(), Split{0, kUnknown});
        for (std::size_t i = 0; i < n; ++i) {
            std::uint64_t number = start + i;
            std::int32_t node = root_;
            while (node >= 0) {
                const Node& here = nodes_[node];
                Split& split = splits[node];
                if (split.remainder == kUnknown)
                    split = here.split(number);
                const std::uint64_t left = split.left;
                split.remainder += here.left;
                const bool goes_left = split.remainder >= here.sum;
                if (goes_left) {
                    split.remainder -= here.sum;
                    ++split.left;
                }
                number = goes_left ? left : number - left;
                node = here.children[goes_left ? 0 : 1];
            }
            dataset[i] = static_cast<std::int16_t>(~node);
            count[i] = static_cast<std::int64_t>(number);
        }
    }

    // out[d]: how many of the first `position` samples dataset d gives; position <= kMaxWeight, the
    // caller checks.
    void counts(std::uint64_t position, std::int64_t* out) const {
        for (std::size_t dataset = 0; dataset < datasets_; ++dataset)
            out[dataset] = 0;
        std::vector<std::pair<std::int32_t, std::uint64_t>> open{{root_, position}};
        while (!open.empty()) {
            const auto [node, number] = open.back();
            open.pop_back();
            if (node < 0) {
                out[~node] = static_cast<std::int64_t>(number);
                continue;
            }
            const std::uint64_t left = nodes_[node].split(number).left;
            open.emplace_back(nodes_[node].children[0], left);
            open.emplace_back(nodes_[node].children[1], number - left);
        }
    }

  private:
    // n a + W / 2 = left W + remainder, so that left = L(n): an odd W loses a half here, which
    // never reaches the next whole number.
    struct Split {
        std::uint64_t left, remainder;
    };

    struct Node {
        std::uint64_t left, sum;   // weights of the left child and of both
        std::int32_t children[2];  // a node, or ~dataset

        Split split(std::uint64_t n) const {
            const unsigned __int128 value = static_cast<unsigned __int128>(n) * left + sum / 2;
            return {static_cast<std::uint64_t>(value / sum),
                    static_cast<std::uint64_t>(value % sum)};
        }
    };

    // no remainder: those are below 2^62
    static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};

    std::size_t datasets_;
    std::int32_t root_ = 0;
    std::vector<Node> nodes_;
};

}  // namespace trainkit
