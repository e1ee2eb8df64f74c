"""Channels between subtasks: Arrow batches and events, in order, under credits.

A channel goes from one subtask to another. Its receiver grants credits, in bytes, as its consumer
takes elements; nothing is sent without, so what is under way in a channel is bounded whatever lies
between its ends. In reading order:

- :mod:`.elements`: what travels, and what it costs;
- :mod:`.credits`: what a sender may still send;
- :mod:`.inbox`: what a subtask reads: all its channels, in turn;
- :mod:`.channel`: the sending end, and the one without a network;
- :mod:`.partition`, :mod:`.outbox`: which channel a row goes to, and when it is sent;
- :mod:`.messages`, :mod:`.pulse`, :mod:`.severing`, :mod:`.server`, :mod:`.client`: the same
  between processes.
"""
