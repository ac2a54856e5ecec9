// Finds data sets by name in the caches of huggingface_hub and of the datasets library; downloads nothing
// (that is `lmlaunch fetch`). Blocks; throws Error(11) with every searched place, or with the configurations
// or splits to choose from.
#pragma once

#include <string>
#include <vector>

namespace lm {

struct DataCaches {
  std::vector<std::string> hub;       // directories with datasets--ORG--NAME: files as uploaded
  std::vector<std::string> datasets;  // directories with ORG___name: Arrow files of load_dataset
};

// "ORG/NAME", "ORG/NAME:SPLIT", "ORG/NAME/CONFIG" or "ORG/NAME/CONFIG:SPLIT"; the split is "train" unless
// named.
struct DataSetName {
  std::string org, name, config, split = "train";
};
// False for text of another form, or with the suffix of a data file.
bool parse_data_set_name(const std::string& text, DataSetName& out);

// The files of that split, sorted.
std::vector<std::string> find_data_set(const std::string& text, const DataSetName& name,
                                       const DataCaches& caches);

}  // namespace lm
