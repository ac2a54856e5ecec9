// A rule's updates of one tensor, for a test to compare with another implementation of the rule. Each line of
// its input, words between tabs, is answered by "done" or by what is wrong: a start of LibTorch takes longer
// than what most ask for.
//
//   RULE SHAPE DONE STEPS LR WEIGHT_DECAY INPUT OUTPUT [KEY=VALUE ...]
//
// SHAPE: ELEMENTS, or ROWSxCOLUMNS. KEY: one of the rule's of [optimizer], a number or numbers between
// colons. INPUT: fp32 weights, where DONE steps are done already each of the rule's states after them, then
// the gradients of each step. OUTPUT: the weights, then each of the rule's states: its values in fp32 or,
// from 4096 elements on where the rule codes them, the codes and the scales. Of a rule that keeps statistics
// of rows and columns, with DONE = 0: those of the rows, those of the columns, or a vector's, in their type.
// Of a rule without masters, with DONE = 0: the weights, which INPUT has in bf16, too, and the states, in
// bf16. Of a rule that steps matrices by their orthogonal momentum, of a matrix with DONE = 0: the momentum.
//
//   maps RULE OUTPUT
//
// OUTPUT: the values of the map of each of the rule's states.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "base/bytes.h"
#include "config/config_names.h"
#include "kernels/library.h"
#include "kernels/newton_schulz.h"
#include "spec/block_layout.h"
#include "tests/support/limit_processor.h"

namespace {

using namespace lm;

struct Case {
  RuleId rule;
  int64_t rows, columns, done, steps;  // rows: 0 of a vector
  double lr, weight_decay;
  RuleSettings settings;
  int64_t elements() const { return std::max<int64_t>(rows, 1) * columns; }
};

// "KEY=VALUE" of the rule's settings.
template <class R>
void set_key(RuleSettings& settings, const std::string& text) {
  const size_t equal = text.find('=');
  const double value = std::atof(text.substr(equal + 1).c_str());
  bool found = false;
  R::keys(settings.of<R>(), [&](const std::string& name, auto& field, const char*, const Range&) {
    if (text.substr(0, equal) != name) return;
    found = true;
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_arithmetic_v<Field>) field = static_cast<Field>(value);
    if constexpr (std::is_same_v<Field, std::vector<double>>) {
      field.clear();
      std::istringstream in(text.substr(equal + 1));
      for (std::string one; std::getline(in, one, ':');) field.push_back(std::atof(one.c_str()));
    }
  });
  if (!found) throw std::runtime_error("no setting " + text);
}

template <class T>
void write(std::ofstream& out, const T* values, int64_t n) {
  out.write(reinterpret_cast<const char*>(values), n * static_cast<int64_t>(sizeof(T)));
}

template <class R>
void run_factored(const Case& c, std::ifstream& in, std::ofstream& out) {
  const auto size = static_cast<int64_t>(dtype_size(R::kStateTensors[0].type));
  std::vector<float> weights(static_cast<size_t>(c.elements())), gradient(weights.size());
  const auto read = [&](std::vector<float>& values) {
    in.read(reinterpret_cast<char*>(values.data()), c.elements() * 4);
    if (!in) throw std::runtime_error("the input is too short");
  };
  const bool vector = c.rows == 0;
  const int64_t rows = std::max<int64_t>(c.rows, 1);
  std::vector<std::byte> row(static_cast<size_t>(rows * size)), column(static_cast<size_t>(c.columns * size));
  std::vector<float> scratch(static_cast<size_t>(factored_scratch(rows, c.columns)));
  read(weights);
  for (int64_t t = 1; t <= c.steps; ++t) {
    read(gradient);
    kernels(DeviceType::kCpu)
        .update({.rule = RuleScalars::at(c.rule, c.settings,
                                         {.lr = c.lr, .weight_decay = c.weight_decay, .t = t}),
                 .gradient = gradient.data(),
                 .weight = weights.data(),
                 .factored = {.rows = rows,
                              .columns = c.columns,
                              .row = vector ? nullptr : row.data(),
                              .column = vector ? nullptr : column.data(),
                              .vector = vector ? column.data() : nullptr,
                              .scratch = scratch.data(),
                              .dtype = R::kStateTensors[0].type},
                 .elements = c.elements()},
                {});
  }
  write(out, weights.data(), c.elements());
  if (!vector) write(out, row.data(), std::ssize(row));
  write(out, column.data(), std::ssize(column));
}

template <class R>
void run_muon(const Case& c, std::ifstream& in, std::ofstream& out) {
  const Kernels& kernels = library_kernels(DeviceType::kCpu);
  std::vector<float> weights(static_cast<size_t>(c.elements())), gradient(weights.size()),
      momentum(weights.size());
  std::vector<std::byte> scratch(static_cast<size_t>(newton_schulz_scratch_bytes(c.rows, c.columns)));
  const auto read = [&](std::vector<float>& values) {
    in.read(reinterpret_cast<char*>(values.data()), c.elements() * 4);
    if (!in) throw std::runtime_error("the input is too short");
  };
  read(weights);
  for (int64_t t = 1; t <= c.steps; ++t) {
    read(gradient);
    RuleUpdate update{
        .rule = RuleScalars::at(c.rule, c.settings, {.lr = c.lr, .weight_decay = c.weight_decay, .t = t}),
        .gradient = gradient.data(),
        .weight = weights.data(),
        .state = {momentum.data()},
        .muon = {.call = MuonState::Call::kDirection,
                 .rows = c.rows,
                 .columns = c.columns,
                 .direction = scratch.data()},
        .elements = c.elements()};
    kernels.update(update, {});
    update.muon.direction = newton_schulz(kernels, c.rows, c.columns, scratch.data(), {});
    update.muon.call = MuonState::Call::kStep;
    kernels.update(update, {});
  }
  write(out, weights.data(), c.elements());
  write(out, momentum.data(), c.elements());
}

template <class R>
void run_bf16(const Case& c, std::ifstream& in, std::ofstream& out) {
  const auto n = static_cast<size_t>(c.elements());
  std::vector<uint16_t> weights(n);
  std::vector<float> gradient(n);
  std::vector<std::vector<uint16_t>> state(kStateCount<R>, std::vector<uint16_t>(n));
  const auto read_bytes = [&](void* to, size_t bytes) {
    in.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (!in) throw std::runtime_error("the input is too short");
  };
  read_bytes(weights.data(), n * 2);
  for (int64_t t = 1; t <= c.steps; ++t) {
    read_bytes(gradient.data(), n * 4);
    RuleUpdate update{
        .rule = RuleScalars::at(c.rule, c.settings, {.lr = c.lr, .weight_decay = c.weight_decay, .t = t}),
        .gradient = gradient.data(),
        .weight = weights.data(),
        .elements = c.elements(),
        .weight_dtype = DType::kBF16,
        .form = MasterForm::kNearest};
    for (size_t s = 0; s < state.size(); ++s) update.state[s] = state[s].data();
    kernels(DeviceType::kCpu).update(update, {});
  }
  write(out, weights.data(), c.elements());
  for (const std::vector<uint16_t>& one : state) write(out, one.data(), c.elements());
}

template <class R>
void run(const Case& c, std::ifstream& in, std::ofstream& out) {
  const int64_t elements = c.elements(), padded = round_up(elements, kCodeBlock);
  bool coded = false;
  int64_t codes_bytes = 0, scales = 0;
  if constexpr (kIsCoded<R>) {
    coded = elements >= kSmallTensor;
    codes_bytes = elements * code_bits(R::kCodes[0]) / 8;
    scales = padded / code_block(R::kCodes[0]);
  }
  const auto read_bytes = [&](void* to, int64_t bytes) {
    in.read(static_cast<char*>(to), bytes);
    if (!in) throw std::runtime_error("the input is too short");
  };
  const auto read = [&](std::vector<float>& values) { read_bytes(values.data(), elements * 4); };
  std::vector<float> weights(static_cast<size_t>(padded)), gradient(weights.size());
  std::vector<std::vector<uint8_t>> codes(kStateCount<R>);
  std::vector<std::vector<float>> state(kStateCount<R>);
  RuleUpdate update{.rule = {}, .gradient = gradient.data(), .weight = weights.data(), .elements = padded};
  for (size_t s = 0; s < state.size(); ++s) {
    state[s].assign(static_cast<size_t>(coded ? scales : padded), 0.F);
    update.state[s] = state[s].data();
    if (!coded) continue;
    codes[s].assign(static_cast<size_t>(padded), 0);
    update.codes[s] = codes[s].data();
  }
  read(weights);
  for (size_t s = 0; c.done > 0 && s < state.size(); ++s) {
    if (coded) read_bytes(codes[s].data(), codes_bytes);
    coded ? read_bytes(state[s].data(), scales * 4) : read(state[s]);
  }
  for (int64_t t = c.done + 1; t <= c.done + c.steps; ++t) {
    read(gradient);
    update.rule = RuleScalars::at(c.rule, c.settings, {.lr = c.lr, .weight_decay = c.weight_decay, .t = t});
    kernels(DeviceType::kCpu).update(update, {});
  }
  write(out, weights.data(), elements);
  for (size_t s = 0; s < state.size(); ++s) {
    if (coded) write(out, codes[s].data(), codes_bytes);
    write(out, state[s].data(), coded ? scales : elements);
  }
}

template <CodeMap map>
void write_map(std::ofstream& out) {
  write(out, make_table<map>().value, 1 << code_bits(map));
}
template <class R, size_t s = 0>
void write_maps(std::ofstream& out) {
  if constexpr (kIsCoded<R> && s < static_cast<size_t>(kStateCount<R>)) {
    write_map<R::kCodes[s]>(out);
    write_maps<R, s + 1>(out);
  }
}

// One line of what is asked.
void answer(const std::vector<std::string>& words) {
  const bool maps = words.size() == 3 && words[0] == "maps";
  if (words.size() < 8 && !maps)
    throw std::runtime_error(
        "RULE SHAPE DONE STEPS LR WEIGHT_DECAY INPUT OUTPUT [KEY=VALUE ...] or maps RULE OUTPUT");
  const auto rule = parse_name<RuleId>(words[maps ? 1 : 0]);
  if (!rule) throw std::runtime_error("no rule " + words[maps ? 1 : 0]);
  std::ofstream out(words[maps ? 2 : 7], std::ios::binary);
  if (maps) {
    Rules::with(*rule, [&](auto type) { write_maps<typename decltype(type)::type>(out); });
  } else {
    const std::string& shape = words[1];
    const size_t by = shape.find('x');
    Case c{.rule = *rule,
           .rows = by == std::string::npos ? 0 : std::atoll(shape.c_str()),
           .columns = std::atoll(shape.c_str() + (by == std::string::npos ? 0 : by + 1)),
           .done = std::atoll(words[2].c_str()),
           .steps = std::atoll(words[3].c_str()),
           .lr = std::atof(words[4].c_str()),
           .weight_decay = std::atof(words[5].c_str()),
           .settings = {}};
    std::ifstream in(words[6], std::ios::binary);
    Rules::with(*rule, [&](auto type) {
      using R = typename decltype(type)::type;
      for (size_t i = 8; i < words.size(); ++i) set_key<R>(c.settings, words[i]);
      if constexpr (kHasNoMaster<R>) {
        run_bf16<R>(c, in, out);
      } else if constexpr (kIsFactored<R>) {
        run_factored<R>(c, in, out);
      } else if constexpr (kIsMuon<R>) {
        c.rows > 0 ? run_muon<R>(c, in, out) : run<R>(c, in, out);
      } else {
        run<R>(c, in, out);
      }
    });
  }
  out.close();
  if (!out) throw std::runtime_error("cannot write the output");
}

}  // namespace

int main() {
  lm::test::limit_processor();
  for (std::string line; std::getline(std::cin, line);) {
    std::string said = "done";
    try {
      std::vector<std::string> words;
      std::istringstream in(line);
      for (std::string word; std::getline(in, word, '\t');) words.push_back(word);
      answer(words);
    } catch (const std::exception& error) {
      said = error.what();
    }
    std::printf("%s\n", said.c_str());
    std::fflush(stdout);
  }
}
