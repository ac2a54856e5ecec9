// Data sets by name, as they lie in the caches of huggingface_hub and of the datasets library: nothing is
// downloaded here (that is `lmlaunch fetch`). Blocks; throws Error(11) with every place that was looked at,
// or with the choice that is left to the user.
#pragma once

#include <string>
#include <vector>

namespace lm {

struct DataCaches {
  std::vector<std::string> hub;  // directories that hold datasets--ORG--NAME: files as they were uploaded
  std::vector<std::string> datasets;  // directories that hold ORG___name: Arrow files, made by load_dataset
};

// "ORG/NAME", "ORG/NAME:SPLIT", "ORG/NAME/CONFIG" or "ORG/NAME/CONFIG:SPLIT"; the split is "train" unless
// named.
struct DataSetName {
  std::string org, name, config, split = "train";
};
// False for what is not of that form, or ends as a data file does.
bool parse_data_set_name(const std::string& text, DataSetName& out);

// The files of that split, sorted.
std::vector<std::string> find_data_set(const std::string& text, const DataSetName& name,
                                       const DataCaches& caches);

}  // namespace lm
