"""The paper's tables, measured here: the parts of reproduce.py.

A table N is two modules, which reproduce.py and reports.py name.

table_N.py measures. It has

- ``settings(run)``: a dict of what decides its figures besides machine, versions and repeats. It is
  called for every table asked for before anything is measured, so it must be cheap; bad input
  raises UserError here. The journal of the table refuses to go on with other settings.
- ``cells(run)``: {name: call}, in the order of measuring. It is called when the table's turn comes,
  and may prepare what its cells share (train a network). A call measures one cell and gives what
  ``frame.cell`` makes: {"place": dict, "rows": list of dicts, "absent": None or why there are no
  rows, "may_pass": whether another try may find some}. Names are keys of the journal: a cell whose
  name is there is not measured again. What cannot be measured on a machine is a cell, too, which
  raises an error that says why.
- ``said_of(found)``: a few words for the terminal about a cell's data.

``run`` is a frame.Run. Every cell is verified before it is timed: a wrong result is a UserError,
which ends the run.

table_N_report.py shows, and imports neither torch nor the library. It has

- ``TITLE``: a few words.
- ``conclusion(data)``: what was found, in one line.
- ``beside(data)``: lines of Markdown, the paper's figures beside ours, for the joined page too.
- ``body(data, picture)``: lines of the table's own page, which hold ``beside``; ``picture`` is the
  file's name.
- ``picture(data)``: the PNG as bytes.

``data`` is {"header": as from run_header, "table": N, "name": of the run (cpu, cuda or --name),
"settings": as from settings(run), "cells": what the calls gave, in order}.
paper.py holds the paper's figures.
"""
