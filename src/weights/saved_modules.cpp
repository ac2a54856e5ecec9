#include "weights/saved_modules.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <set>
#include <string_view>

#include "spec/adapter_sites.h"
#include "spec/whole_modules.h"
#include "weights/peft_modules.h"
#include "weights/tensor_names.h"

namespace lm {
namespace {

constexpr const char* kKey = "modules_to_save";
constexpr size_t kMostEntries = 1000;  // each is compared with every module

bool ends(const std::string& path, const std::string& entry) {
  return path.ends_with(entry) || wrapped_name(path).ends_with(entry);
}

bool is_true(const Json& config, const char* key) {
  const auto it = config.find(key);
  return it != config.end() && *it == true;
}

std::vector<std::string> entries_of(const Json& config, const std::string& place) {
  std::vector<std::string> out;
  const auto it = config.find(kKey);
  if (it == config.end() || it->is_null()) return out;
  if (!it->is_array()) refuse_adapter(kKey, "must be a list of module names", place);
  if (it->size() > kMostEntries)
    refuse_adapter(kKey, fmt::format("has more than {} entries", kMostEntries), place);
  for (const Json& entry : *it) {
    if (!entry.is_string() || entry == "") refuse_adapter(kKey, "must be a list of module names", place);
    out.push_back(entry.get<std::string>());
  }
  return out;
}

constexpr const char* kTokens = "trainable_token_indices";

std::vector<int64_t> indices_of(const Json& list, const ModelSpec& base, const std::string& place) {
  if (!list.is_array()) refuse_adapter(kTokens, "must be a list of tokens", place);
  std::vector<int64_t> out;
  std::set<int64_t> known;
  for (const Json& token : list) {
    const int64_t id = token.is_number_integer() ? token.get<int64_t>() : -1;
    if (id < 0 || id >= base.vocab)
      refuse_adapter(kTokens, fmt::format("must be integers in 0 .. {}", base.vocab - 1), place);
    if (!known.insert(id).second) refuse_adapter(kTokens, fmt::format("has {} twice", id), place);
    out.push_back(id);
  }
  return out;
}

}  // namespace

std::vector<int64_t> read_token_indices(const Json& config, const ModelSpec& base, const std::string& place) {
  const auto it = config.find(kTokens);
  if (it == config.end() || it->is_null()) return {};
  if (!it->is_object()) return indices_of(*it, base, place);
  std::optional<std::vector<int64_t>> of_embedding, of_head;
  for (const auto& [name, list] : it->items()) {
    const bool embedding = names_module(name, base.names.embedding),
               head = base.tied && names_module(name, base.names.head);
    if (!embedding && !head)
      refuse_adapter(kTokens,
                     "of \"" + name.substr(0, 100) + "\" are not supported, only those of the embedding",
                     place);
    (embedding ? of_embedding : of_head) = indices_of(list, base, place);
  }
  if (of_head && of_head != of_embedding)
    refuse_adapter(kTokens, "are others of the head than of the embedding that it is tied to", place);
  return of_embedding.value_or(std::vector<int64_t>());
}

std::vector<std::string> read_saved_modules(const Json& config, const ModelSpec& base,
                                            const std::string& place) {
  const auto task = config.find("task_type");
  const bool scores = task != config.end() && *task == "SEQ_CLS";
  const bool tied = base.tied && !scores;  // a head of scores is a matrix of its own
  const std::vector<WholeModule> modules = whole_modules(base);
  const std::vector<AdapterModule> linear = adapter_modules(base);
  std::vector<bool> chosen(modules.size());
  bool tied_head = false;
  for (const std::string& entry : entries_of(config, place)) {
    if (scores && (entry == "score" || entry == "classifier")) continue;
    const std::string shown = "= [\"" + entry.substr(0, 100) + "\"] is not supported: ";
    const bool of_linear = std::any_of(linear.begin(), linear.end(),
                                       [&](const AdapterModule& module) { return ends(module.path, entry); });
    if (of_linear) refuse_adapter(kKey, shown + "it names a linear layer of the blocks", place);
    bool known = tied && ends(base.names.head, entry);
    tied_head = tied_head || known;
    for (size_t m = 0; m < modules.size(); ++m) {
      if (!ends(modules[m].path, entry)) continue;
      chosen[m] = known = true;
    }
    if (!known) refuse_adapter(kKey, shown + "it names no embedding, head or norm of the model", place);
  }
  // The embedding comes first.
  const bool ensured = is_true(config, "ensure_weight_tying");
  if (tied && tied_head && !chosen.front() && !ensured)
    refuse_adapter(kKey,
                   "has the head without the embedding that it is tied to, and ensure_weight_tying is not "
                   "true: PEFT has trained a head of its own",
                   place);
  if (tied && chosen.front() && !tied_head && !ensured)
    refuse_adapter(kKey,
                   "has the embedding without the head that is tied to it, and ensure_weight_tying is not "
                   "true: in PEFT the head is still the base model's",
                   place);
  if (tied_head) chosen.front() = true;
  std::vector<std::string> out;
  for (size_t m = 0; m < modules.size(); ++m)
    if (chosen[m]) out.push_back(modules[m].path);
  return out;
}

SavedModules saved_modules(const ModelSpec& base, const std::vector<std::string>& also) {
  SavedModules out;
  const bool wrapped = !base.wrapper.empty();
  const auto is_chosen = [&](const std::string& path) {
    return std::find(also.begin(), also.end(), path) != also.end();
  };
  const std::vector<WholeModule> modules = whole_modules(base);
  std::set<std::string> entries;
  for (const std::string& path : also) {
    std::string entry = wrapped ? wrapped_name(path) : path.substr(path.rfind('.') + 1);
    const bool others = std::any_of(modules.begin(), modules.end(), [&](const WholeModule& module) {
      return ends(module.path, entry) && !is_chosen(module.path);
    });
    entries.insert(others ? path : entry);
  }
  if (base.tied && is_chosen(base.names.embedding)) {
    out.ensures_tying = std::string_view(base.names.embedding).ends_with("embed_tokens");
    out.copies_head = true;
    if (!out.ensures_tying) entries.insert(base.names.head);
  }
  out.entries.assign(entries.begin(), entries.end());
  return out;
}

}  // namespace lm
