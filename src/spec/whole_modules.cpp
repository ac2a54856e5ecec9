#include "spec/whole_modules.h"

#include <algorithm>

#include "spec/adapter_sites.h"

namespace lm {

std::vector<WholeModule> whole_modules(const ModelSpec& spec) {
  std::vector<WholeModule> out = {{spec.names.embedding, kAlsoEmbedding}};
  if (spec.embedding.positions > 0) out.push_back({spec.names.positions, ""});
  for (AdapterModule& norm : norm_modules(spec)) out.push_back({std::move(norm.path), kAlsoNorms});
  if (!spec.tied && !spec.scores()) out.push_back({spec.names.head, kAlsoHead});
  return out;
}

std::vector<std::string> shortest_also(const ModelSpec& spec, const std::vector<std::string>& paths) {
  const std::vector<WholeModule> modules = whole_modules(spec);
  const auto chosen = [&](const WholeModule& module) {
    return std::find(paths.begin(), paths.end(), module.path) != paths.end();
  };
  std::vector<std::string> out;
  for (const WholeModule& module : modules) {
    if (!chosen(module)) continue;
    const bool all =
        !module.word.empty() && std::all_of(modules.begin(), modules.end(), [&](const WholeModule& other) {
          return other.word != module.word || chosen(other);
        });
    const std::string name = all ? std::string(module.word) : module.path;
    if (std::find(out.begin(), out.end(), name) == out.end()) out.push_back(name);
  }
  return out;
}

bool AdapterSpec::trains_whole(std::string_view tensor) const {
  return std::find(also.begin(), also.end(), tensor.substr(0, tensor.rfind('.'))) != also.end();
}

}  // namespace lm
