"""The pure core: what to send and how to read the reply, decided by functions that never touch a socket or a clock.

Nothing in here imports redis, asyncio, threading, time, random or logging. An operation is a *flow*
(:mod:`chasqui.protocol.flow`): a generator that yields commands and is sent the replies; ``chasqui.redis_io`` has the
two short drivers, blocking and asyncio, that do the talking. Time, randomness and new ids enter as arguments.

A job's life, with the keys it passes (all of queue ``q`` start with ``{chasqui:q}``, so a queue is one cluster slot):

    add ------------------------> :stream --read--> pending in the group --ack--> gone (+ :result:<id>)
    add_in/add_at --> :delayed --promote--^                 |
                         ^------------- retry --------------|
                                                            `--give up--> :dlq --replay--> :stream

    key                     type     content
    :stream                 stream   jobs ready to run: d = envelope, n = name
    :delayed                zset     member = name length, name, envelope; score = run-at in epoch ms
    :dlq                    stream   dead letters: d, n, source_id, reason, detail, error
    :events                 stream   what happened to jobs
    :result:<id>            string   what the handler returned, MessagePack
    :dlid:<id>              string   the id is taken: a job with it was added within dedup_ttl
    :didx:<id>              string   the member of a delayed job that has an id, for cancelling it
    :repeat                 zset     member = spec key, score = next fire in epoch ms
    :repeat:spec:<key>      hash     spec = the stored spec, fired = how often
    :promoter:lock  :scheduler:lock  who leads
    :paused                 string   present while the queue is paused
    :spark:<sid>:session    hash     the lease of a Spark checkpoint, and how its jobs are settled
    :spark:<sid>:batch:<n>  hash     the jobs of one of its batches (:mod:`chasqui.protocol.manifests`)
    :stage:<id>             hash     blocks that a task of a transactional writer has set down; see transact
    :txn:<app id>           hash     how far that writer's version is published in this queue
"""
