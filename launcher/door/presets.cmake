# Writes OUT, a C++ file with the text of every configs/*.toml, so that `lmlaunch presets` needs no files.
#   cmake -DOUT=presets_text.cpp -DFILES="a.toml;b.toml" -P presets.cmake
set(rows "")
foreach(file ${FILES})
  get_filename_component(name ${file} NAME_WLE)
  file(READ ${file} text)
  string(APPEND rows "    {\"${name}\", R\"preset(${text})preset\"},\n")
endforeach()
file(WRITE ${OUT}
"#include \"launcher/door/commands.h\"

namespace lm {

const std::vector<Preset>& presets() {
  static const std::vector<Preset> kPresets = {
${rows}  };
  return kPresets;
}

}  // namespace lm
")
