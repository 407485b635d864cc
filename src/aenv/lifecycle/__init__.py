"""The lifecycle of a sandbox as a pure transition table. No I/O, no clock.

* events.py: what can happen (requests, outcomes) and what a node can be told to do (actions)
* states.py: the states, what of them is durable, what of them is public
* table.py: (state, event) → decision, and how to read one
* machine.py: Lifecycle, the state and generations of one sandbox
* recovery.py: what a restarted server does with a record
* diagram.py: docs/lifecycle.md, from all of these
"""
