"""What comes from outside is data: guarded reading, processes with limits, printable text.

:mod:`toast.boundary.regular_files` reads files that a user or a file names,
:mod:`toast.boundary.children` runs what may hang, crash or take all memory in a process of its own,
and :mod:`toast.boundary.printable` keeps terminals from obeying names.  ``docs/security.md`` says
what is trusted.
"""
