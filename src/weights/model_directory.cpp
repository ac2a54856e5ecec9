#include "weights/model_directory.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/file.h"
#include "spec/families/family.h"
#include "spec/parameter.h"
#include "weights/model_files.h"

namespace lm {
namespace {

// A tensor that files of that form have, and those of the other do not.
std::string tensor_of(const ModelSpec& spec) {
  for (const BlockParameters& block : list_parameters(spec, nullptr)) {
    const auto expert = std::ranges::find_if(block.trainable, &Parameter::of_expert);
    if (expert != block.trainable.end()) return expert->parts.front().file;
  }
  return "";
}

}  // namespace

ModelSpec read_model_spec(const std::string& directory) {
  const std::string path = directory + "/config.json";
  ModelSpec spec = parse_model_spec(read_small_file(path, kMostConfigBytes), path);
  if (!spec.class_names) return spec;
  ModelSpec of_class = spec;
  of_class.names = *spec.class_names;
  const std::vector<std::string> names = tensor_names(directory);
  return std::ranges::find(names, tensor_of(of_class)) != names.end() ? of_class : spec;
}

}  // namespace lm
