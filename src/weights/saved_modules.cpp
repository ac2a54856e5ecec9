#include "weights/saved_modules.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "spec/adapter_sites.h"
#include "spec/whole_modules.h"
#include "weights/peft_modules.h"
#include "weights/tensor_names.h"

namespace lm {
namespace {

constexpr const char* kKey = "modules_to_save";

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
  for (const Json& entry : *it) {
    if (!entry.is_string() || entry == "") refuse_adapter(kKey, "must be a list of module names", place);
    out.push_back(entry.get<std::string>());
  }
  return out;
}

}  // namespace

std::vector<std::string> read_saved_modules(const Json& config, const ModelSpec& base,
                                            const std::string& place) {
  const auto task = config.find("task_type");
  const bool scores = task != config.end() && *task == "SEQ_CLS";
  const std::vector<WholeModule> modules = whole_modules(base);
  const std::vector<AdapterModule> linear = adapter_modules(base);
  std::vector<bool> chosen(modules.size());
  bool tied_head = false;
  for (const std::string& entry : entries_of(config, place)) {
    if (scores && (entry == "score" || entry == "classifier")) continue;
    const std::string shown = "= [\"" + entry.substr(0, 100) + "\"] is not supported: ";
    const bool of_linear = std::any_of(linear.begin(), linear.end(), [&](const AdapterModule& module) {
      return ends(module.path, entry);
    });
    if (of_linear) refuse_adapter(kKey, shown + "it names a linear layer of the blocks", place);
    bool known = base.tied && ends(base.names.head, entry);
    tied_head = tied_head || known;
    for (size_t m = 0; m < modules.size(); ++m) {
      if (!ends(modules[m].path, entry)) continue;
      chosen[m] = known = true;
    }
    if (!known) refuse_adapter(kKey, shown + "it names no embedding, head or norm of the model", place);
  }
  // The embedding comes first.
  const bool ensured = is_true(config, "ensure_weight_tying");
  if (base.tied && tied_head && !chosen.front() && !ensured)
    refuse_adapter(kKey,
                   "has the head without the embedding that it is tied to, and ensure_weight_tying is not "
                   "true: PEFT has trained a head of its own",
                   place);
  if (base.tied && chosen.front() && !tied_head && !ensured)
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
    out.copies_head = !out.ensures_tying;
    if (out.copies_head) entries.insert(base.names.head);
  }
  out.entries.assign(entries.begin(), entries.end());
  return out;
}

}  // namespace lm
