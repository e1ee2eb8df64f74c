"""State by the column: keys, states and timers of a whole batch at a time, without a loop per row.

What is stored is what the row-wise states store, to the byte: an operator may go from one to the
other with its state.
"""
