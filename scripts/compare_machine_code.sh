#!/bin/sh
# Compares the GPU code of two builds, kernel by kernel, whatever the kernels are called:
#
#   sh scripts/compare_machine_code.sh before/libspamm_torch.so after/libspamm_torch.so
#
# Prints a line for each kernel that only one side has: its chip, a digest of its instructions, its
# name. Exit code: 0 equal, 1 different, 2 error. Needs cuobjdump (of CUDA's toolkit or triton's package), diff.
set -eu
if [ $# -ne 2 ]; then
  echo "compare_machine_code: expected two libraries; got $# arguments" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for side in 1 2; do
  eval "library=\$$side"
  cuobjdump -sass "$library" >"$work/sass" || exit 2
  # Instructions name other functions between backquotes; a kernel ends where the next begins.
  awk '
    function flush() { if (name != "") { print code | digest; close(digest) } code = "" }
    /^arch = / || /^\tcode for / { chip = $NF }
    /^\t\tFunction : / {
      flush(); name = $NF; digest = "sha256sum | sed \"s/ .*/ " name "/; s/^/" chip " /\""; next
    }
    /\/\*[0-9a-f]+\*\// { gsub(/`\([^)]*\)/, "`()"); code = code $0 "\n" }
    END { flush() }
  ' "$work/sass" | sort >"$work/$side"
  cut -d' ' -f1,2 "$work/$side" >"$work/code$side"
done
[ -s "$work/1" ] || { echo "compare_machine_code: expected kernels; found none in $1" >&2; exit 2; }
echo "kernels: $(wc -l <"$work/code1") and $(wc -l <"$work/code2")"
diff "$work/code1" "$work/code2" >"$work/found" && exit 0
sed -n 's/^[<>] //p' "$work/found" | sort -u >"$work/which"
for side in 1 2; do
  grep -F -f "$work/which" "$work/$side" | sed "s/^/only in $side or more often: /" || true
done
exit 1
