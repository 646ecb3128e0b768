"""Paths for programs that link the library: its file, its header's folder, its CMake package."""

from ._library import cmake_prefix_path, include_path, library_path

__all__ = ["cmake_prefix_path", "include_path", "library_path"]
