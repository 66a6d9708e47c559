# Included by ./build.sh source --minimal ahead of PyTorch's own CMakeLists.txt: kernels for the
# baseline instruction set alone, and no optimisation, whatever level a target asks for.
foreach(lang C CXX)
  foreach(isa AVX2 AVX512)
    foreach(i 1 2 3) # what cmake/Modules/FindAVX.cmake would find out
      set(${lang}_HAS_${isa}_${i} OFF CACHE INTERNAL "")
    endforeach()
  endforeach()
  set(CMAKE_${lang}_COMPILE_OBJECT
      "<CMAKE_${lang}_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -O0 -o <OBJECT> -c <SOURCE>")
endforeach()
