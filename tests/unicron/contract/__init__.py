"""A collective backend for tests that behaves as NCCL does at a fault where gloo does not.

It runs on CPUs, on gloo, and ends the process loudly where a program does what would crash, hang or train on garbage on
a device. A rank uses it where its environment says so (``settings.MODE``); ``tests.unicron.zygote`` has it installed.

    settings        the environment
    guard           what may not happen at once, and how a broken rule ends the process
    work            one collective, and its outcome
    stream          what the device does behind the host's back
    operations      what each collective reads, writes and has gloo do
    communicator    collectives in the order of their issue, on a thread
    bootstrap       how the ranks of a communicator meet
    hiding          the sockets that only gloo has
    watchdog        torch's threads that look for dead peers
    group           torch's process group, with communicators made when they are needed
    backend         what the product asks (``unicron.backend``)

The rules are those of torch 2.13 and NCCL 2.28; the comments say where they come from.
"""
