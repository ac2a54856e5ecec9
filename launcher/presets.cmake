# Writes OUT, a C++ file with the texts of configs/*.toml.
#   cmake -DOUT=presets_text.cpp -DPRESETS="a.toml;b.toml" -P presets.cmake
set(rows "")
foreach(file ${PRESETS})
  get_filename_component(name ${file} NAME_WLE)
  file(READ ${file} text)
  string(APPEND rows "    {\"${name}\", R\"preset(${text})preset\"},\n")
endforeach()
file(WRITE ${OUT}
"#include \"launcher/preset_table.h\"

namespace lm {

const std::vector<Preset>& preset_files() {
  static const std::vector<Preset> kFiles = {
${rows}  };
  return kFiles;
}

}  // namespace lm
")
