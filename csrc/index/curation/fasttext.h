// What a fastText model says of a text: the .bin and .ftz files of fastText (facebookresearch/
// fastText, src/{args,dictionary,densematrix,quantmatrix,productquantizer,loss}.cc, version 12),
// supervised ones. What a word adds is remembered, which makes it several times as fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xxh64.h"

namespace trainkit {

// A file read piece by piece. std::runtime_error: it ends too early, or a size in it is impossible.
class ModelFile {
  public:
    explicit ModelFile(const std::string& path) : in_(path, std::ios::binary | std::ios::ate) {
        if (!in_)
            throw std::runtime_error("it cannot be opened");
        left_ = static_cast<std::uint64_t>(in_.tellg());
        in_.seekg(0);
    }

    template <typename T>
    T get() {
        T value;
        read(&value, sizeof value);
        return value;
    }

    template <typename T>
    std::vector<T> array(std::int64_t count) {
        if (count < 0 || static_cast<std::uint64_t>(count) > left_ / sizeof(T))
            throw std::runtime_error("it is cut off, or no model");
        std::vector<T> values(static_cast<std::size_t>(count));
        read(values.data(), values.size() * sizeof(T));
        return values;
    }

    bool flag() { return get<std::uint8_t>() != 0; }

    std::string text() {
        std::string value;
        while (const char c = get<char>())
            value += c;
        return value;
    }

  private:
    void read(void* to, std::uint64_t size) {
        if (size > left_ || !in_.read(static_cast<char*>(to), static_cast<std::streamsize>(size)))
            throw std::runtime_error("it is cut off, or no model");
        left_ -= size;
    }

    std::ifstream in_;
    std::uint64_t left_ = 0;
};

// Sub-vectors of 256 centroids each.
class ProductQuantizer {
  public:
    static constexpr std::int32_t kCentroids = 256;

    void load(ModelFile& file) {
        dim_ = file.get<std::int32_t>();
        parts = file.get<std::int32_t>();
        size_ = file.get<std::int32_t>();
        last_ = file.get<std::int32_t>();
        centroids_ = file.array<float>(std::int64_t{dim_} * kCentroids);
        if (parts < 1 || size_ < 1 || last_ < 1 || last_ > size_ ||
            std::int64_t{parts - 1} * size_ + last_ != dim_)
            throw std::runtime_error("its quantizer is damaged");
    }

    std::int32_t dim() const { return dim_; }

    // out[i] += scale * the vector that `codes` stand for
    void add(const std::uint8_t* codes, float scale, float* out) const {
        for (std::int32_t part = 0; part < parts; ++part) {
            const std::int32_t size = part == parts - 1 ? last_ : size_;
            const float* const centroid = centroids_.data() +
                                          std::size_t(part) * kCentroids * size_ +
                                          std::size_t(codes[part]) * size;
            for (std::int32_t i = 0; i < size; ++i)
                out[part * size_ + i] += scale * centroid[i];
        }
    }

    float first(std::uint8_t code) const { return centroids_[code]; }

    std::int32_t parts = 0;

  private:
    std::int32_t dim_ = 0, size_ = 0, last_ = 0;
    std::vector<float> centroids_;
};

// Rows of floats, as they are or quantized.
class ModelMatrix {
  public:
    void load(ModelFile& file, bool quantized) {
        quantized_ = quantized;
        norms_ = quantized && file.flag();
        rows = file.get<std::int64_t>();
        dim = file.get<std::int64_t>();
        if (rows < 0 || dim < 1 || dim > (1 << 20) || rows > (std::int64_t{1} << 40) / dim)
            throw std::runtime_error("its matrices are damaged");
        if (!quantized) {
            values_ = file.array<float>(rows * dim);
            return;
        }
        codes_ = file.array<std::uint8_t>(file.get<std::int32_t>());
        quantizer_.load(file);
        if (quantizer_.dim() != dim ||
            static_cast<std::int64_t>(codes_.size()) != rows * quantizer_.parts)
            throw std::runtime_error("its matrices are damaged");
        if (norms_) {
            norm_codes_ = file.array<std::uint8_t>(rows);
            norm_quantizer_.load(file);
        }
    }

    // out += the row; a row that is not there adds nothing
    void add(std::int64_t row, float* out) const {
        if (row < 0 || row >= rows)
            return;
        if (!quantized_) {
            const float* const values = values_.data() + row * dim;
            for (std::int64_t i = 0; i < dim; ++i)
                out[i] += values[i];
            return;
        }
        const float norm = norms_ ? norm_quantizer_.first(norm_codes_[std::size_t(row)]) : 1;
        quantizer_.add(codes_.data() + row * quantizer_.parts, norm, out);
    }

    float dot(std::int64_t row, const std::vector<float>& with) const {
        std::vector<float> values(with.size());
        add(row, values.data());
        float sum = 0;
        for (std::size_t i = 0; i < with.size(); ++i)
            sum += values[i] * with[i];
        return sum;
    }

    std::int64_t rows = 0, dim = 0;

  private:
    bool quantized_ = false, norms_ = false;
    std::vector<float> values_;
    std::vector<std::uint8_t> codes_, norm_codes_;
    ProductQuantizer quantizer_, norm_quantizer_;
};

class FastTextModel {
  public:
    explicit FastTextModel(const std::string& path) {
        ModelFile file(path);
        if (file.get<std::int32_t>() != kMagic || file.get<std::int32_t>() != kVersion)
            throw std::runtime_error("it is no fastText model of version 12");
        load_arguments(file);
        load_dictionary(file);
        const bool quantized = file.flag();
        input_.load(file, quantized);
        const bool quantized_output = file.flag();
        output_.load(file, quantized && quantized_output);
        if (input_.dim != dim_ || output_.dim != dim_ ||
            output_.rows != static_cast<std::int64_t>(labels.size()) || labels.empty())
            throw std::runtime_error("its parts do not fit one another");
        if (loss_ == kHierarchical)
            build_tree();
    }

    // Probabilities of the labels for a text whose line feeds are spaces; empty: it has no word
    // that the model knows.
    std::vector<float> predict(std::string_view text) {
        std::vector<float> hidden(static_cast<std::size_t>(dim_), 0);
        const std::int64_t count = add_words(text, hidden);
        if (count == 0)
            return {};
        for (float& value : hidden)
            value /= static_cast<float>(count);
        std::vector<float> found(labels.size());
        if (loss_ == kHierarchical) {
            walk(hidden, found);
            return found;
        }
        float most = -INFINITY;
        for (std::size_t label = 0; label < found.size(); ++label) {
            found[label] = output_.dot(static_cast<std::int64_t>(label), hidden);
            most = std::max(most, found[label]);
        }
        float sum = 0;
        for (float& value : found) {
            value = loss_ == kSoftmax ? std::exp(value - most) : 1 / (1 + std::exp(-value));
            sum += value;
        }
        for (float& value : found)
            value /= loss_ == kSoftmax ? sum : 1;
        return found;
    }

    std::vector<std::string> labels;

  private:
    static constexpr std::int32_t kMagic = 793712314, kVersion = 12;
    static constexpr std::int32_t kHierarchical = 1, kSoftmax = 3, kSupervised = 3;
    static constexpr std::size_t kMost = std::size_t{1}
                                         << 17;  // places for words, of which half are used
    static constexpr const char* kEnd = "</s>";
    static constexpr std::int64_t kUnmade = 1000000000000000;  // above the count of any label

    // What a word adds: `rows` rows, whose sum is at `sum` in sums_.
    struct Addition {
        std::uint64_t key;
        std::size_t sum;
        std::int64_t rows;
        std::int32_t hash;
        bool label, known;
    };

    struct Node {
        std::int64_t count;
        std::size_t left, right;
    };

    void load_arguments(ModelFile& file) {
        dim_ = file.get<std::int32_t>();
        for (int skipped = 0; skipped < 4; ++skipped)  // ws, epoch, minCount, neg
            file.get<std::int32_t>();
        word_grams_ = file.get<std::int32_t>();
        loss_ = file.get<std::int32_t>();
        const auto kind = file.get<std::int32_t>();
        bucket_ = file.get<std::int32_t>();
        shortest_ = file.get<std::int32_t>();
        longest_ = file.get<std::int32_t>();
        file.get<std::int32_t>();  // lrUpdateRate
        file.get<double>();        // t
        if (kind != kSupervised)
            throw std::runtime_error("it gives no labels: it was not trained as supervised");
        if (dim_ < 1 || bucket_ < 0)
            throw std::runtime_error("its arguments are damaged");
    }

    void load_dictionary(ModelFile& file) {
        const auto entries = file.get<std::int32_t>();
        words_ = file.get<std::int32_t>();
        file.get<std::int32_t>();  // labels
        file.get<std::int64_t>();  // tokens
        const auto pruned = file.get<std::int64_t>();
        for (std::int32_t entry = 0; entry < entries; ++entry) {
            std::string word = file.text();
            const auto count = file.get<std::int64_t>();
            if (file.get<std::int8_t>() == 0) {
                ids_.emplace(std::move(word), entry);
            } else {
                labels.push_back(std::move(word));
                counts_.push_back(count);
            }
        }
        is_pruned_ = pruned >= 0;
        for (std::int64_t pair = 0; pair < pruned; ++pair) {
            const auto from = file.get<std::int32_t>();
            kept_[from] = file.get<std::int32_t>();
        }
    }

    static std::uint32_t fnv(std::string_view text) {
        std::uint32_t hash = 2166136261u;
        for (const char c : text)
            hash = (hash ^ static_cast<std::uint32_t>(static_cast<std::int8_t>(c))) * 16777619u;
        return hash;
    }

    // The row of a bucket is added; of a pruned model only if it was kept.
    void add_bucket(std::int64_t bucket, float* sum, std::int64_t& rows) const {
        if (is_pruned_) {
            const auto kept = kept_.find(static_cast<std::int32_t>(bucket));
            if (kept == kept_.end())
                return;
            bucket = kept->second;
        }
        input_.add(words_ + bucket, sum);
        ++rows;
    }

    void add_characters(const std::string& word, float* sum, std::int64_t& rows) const {
        for (std::size_t i = 0; i < word.size(); ++i) {
            if ((word[i] & 0xC0) == 0x80)
                continue;
            std::size_t j = i;
            for (std::int32_t n = 1; j < word.size() && n <= longest_; ++n) {
                ++j;
                while (j < word.size() && (word[j] & 0xC0) == 0x80)
                    ++j;
                if (n >= shortest_ && bucket_ > 0 && !(n == 1 && (i == 0 || j == word.size())))
                    add_bucket(fnv({word.data() + i, j - i}) % bucket_, sum, rows);
            }
        }
    }

    void make(std::string_view text, Addition& made) {
        const std::string word(text);
        made.sum = sums_.size();
        made.rows = 0;
        made.hash = static_cast<std::int32_t>(fnv(text));
        made.label = word.rfind("__label__", 0) == 0;
        made.known = true;
        sums_.resize(sums_.size() + static_cast<std::size_t>(dim_), 0);
        float* const sum = sums_.data() + made.sum;
        const auto id = ids_.find(word);
        if (id != ids_.end()) {
            input_.add(id->second, sum);
            ++made.rows;
        }
        if (longest_ > 0 && word != kEnd && !made.label)
            add_characters("<" + word + ">", sum, made.rows);
    }

    const Addition& addition(std::string_view word) {
        const std::uint64_t key = xxh64(word.data(), word.size());
        if (sums_.size() >= kMost / 2 * static_cast<std::size_t>(dim_)) {
            memory_.assign(kMost, Addition{});
            sums_.clear();
        }
        std::size_t at = key % kMost;
        while (memory_[at].known && memory_[at].key != key)
            at = (at + 1) % kMost;
        if (!memory_[at].known) {
            memory_[at].key = key;
            make(word, memory_[at]);
        }
        return memory_[at];
    }

    static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r') || c == '\0'; }

    // Adds the rows of all words and of the end of the line; returns how many.
    std::int64_t add_words(std::string_view text, std::vector<float>& hidden) {
        std::int64_t rows = 0;
        std::vector<std::int32_t> hashes;
        const auto take = [&](std::string_view word) {
            const Addition& added = addition(word);
            if (added.label)
                return;
            const float* const sum = sums_.data() + added.sum;
            for (std::size_t i = 0; i < hidden.size(); ++i)
                hidden[i] += sum[i];
            rows += added.rows;
            if (word_grams_ > 1)
                hashes.push_back(added.hash);
        };
        for (std::size_t at = 0; at < text.size();) {
            while (at < text.size() && is_space(text[at]))
                ++at;
            const std::size_t start = at;
            while (at < text.size() && !is_space(text[at]))
                ++at;
            const std::string_view word = text.substr(start, at - start);
            if (word == kEnd)
                break;  // as there: it ends the line wherever it stands
            if (!word.empty())
                take(word);
        }
        take(kEnd);
        for (std::size_t i = 0; i < hashes.size(); ++i) {
            auto hash = static_cast<std::uint64_t>(std::int64_t{hashes[i]});
            for (std::size_t j = i + 1; j < hashes.size() && j < i + std::size_t(word_grams_);
                 ++j) {
                hash = hash * 116049371u + static_cast<std::uint64_t>(std::int64_t{hashes[j]});
                if (bucket_ > 0)
                    add_bucket(static_cast<std::int64_t>(hash % std::uint64_t(bucket_)),
                               hidden.data(), rows);
            }
        }
        return rows;
    }

    // Huffman's tree of the labels, as HierarchicalSoftmaxLoss::buildTree.
    void build_tree() {
        const std::size_t leaves = labels.size();
        nodes_.assign(2 * leaves - 1, Node{kUnmade, 0, 0});
        for (std::size_t i = 0; i < leaves; ++i) {
            if (counts_[i] < 0 || counts_[i] >= kUnmade / std::int64_t(leaves))
                throw std::runtime_error("its labels' counts are damaged");
            nodes_[i].count = counts_[i];
        }
        std::size_t leaf = leaves;  // one more than the next
        std::size_t node = leaves;
        for (std::size_t i = leaves; i < nodes_.size(); ++i) {
            const auto take = [&] {
                if (leaf > 0 && nodes_[leaf - 1].count < nodes_[node].count)
                    return --leaf;
                return node++;
            };
            nodes_[i].left = take();
            nodes_[i].right = take();
            nodes_[i].count = nodes_[nodes_[i].left].count + nodes_[nodes_[i].right].count;
        }
    }

    // From the root down: a node's children stand before it.
    void walk(const std::vector<float>& hidden, std::vector<float>& found) const {
        std::vector<float> scores(nodes_.size(), 0);
        for (std::size_t node = nodes_.size(); node-- > labels.size();) {
            const float dot = output_.dot(static_cast<std::int64_t>(node - labels.size()), hidden);
            const float right = 1 / (1 + std::exp(-dot));
            scores[nodes_[node].left] = scores[node] + log_of(1 - right);
            scores[nodes_[node].right] = scores[node] + log_of(right);
        }
        for (std::size_t label = 0; label < found.size(); ++label)
            found[label] = std::exp(scores[label]);
    }

    static float log_of(float value) { return std::log(value + 1e-5f); }

    std::int32_t dim_ = 0, word_grams_ = 0, loss_ = 0, bucket_ = 0, shortest_ = 0, longest_ = 0;
    std::int32_t words_ = 0;
    bool is_pruned_ = false;
    std::unordered_map<std::string, std::int32_t> ids_;
    std::unordered_map<std::int32_t, std::int32_t> kept_;
    std::vector<std::int64_t> counts_;
    ModelMatrix input_, output_;
    std::vector<Node> nodes_;
    std::vector<Addition> memory_ = std::vector<Addition>(kMost, Addition{});
    std::vector<float> sums_;
};

}  // namespace trainkit
