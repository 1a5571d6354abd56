"""Untrusted input: limited reading, processes with limits, typed data and printable text.

:mod:`toast.boundary.regular_files` reads files, :mod:`toast.boundary.children` runs code that may
hang, crash or use all memory in a child process, :mod:`toast.boundary.typed` checks data against
types, and :mod:`toast.boundary.printable` removes control characters from text for terminals.
``docs/security.md`` says what is trusted.
"""
