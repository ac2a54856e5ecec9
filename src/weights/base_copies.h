// Copies of a base model's vocabulary matrices in an adapter's file. PEFT writes them where the matrices have
// an adapter or had another size once, trained or not. Read-only; errors are Error(11).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "spec/model_spec.h"
#include "weights/model_files.h"

namespace lm {

struct BaseCopy {
  std::string name;  // in the adapter's file
  // What it must equal: a tensor of the adapter's file, or, where that is "", one of the base's files.
  std::string of_adapter, of_base;
};
// Copies of the base's tensors among those that `own` does not name: the adapter's tensors. A tied head is a
// copy of the embedding.
std::vector<BaseCopy> base_copies(const ModelFiles& adapter, const ModelSpec& base,
                                  const std::function<bool(const std::string& name)>& own);

// The names under which an adapter's file may have the base's matrix of that module.
std::vector<std::string> names_of_copies(const std::string& path);

// Throws unless all values are equal, in the copy's type. With `directory` "" the base is not compared.
void require_equal(const ModelFiles& adapter, const std::vector<BaseCopy>& copies,
                   const std::string& directory);

}  // namespace lm
