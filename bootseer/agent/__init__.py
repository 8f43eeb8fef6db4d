"""The node's agent: a Python that has imported what its tasks need, and forks for each request.

`client` asks the agent, `server` is the agent, and `private_server` is the same for one process
alone. Both serve by `fork_server` and speak `protocol`. This room imports no feature: what its
`tasks` are is given to it as text.
"""
