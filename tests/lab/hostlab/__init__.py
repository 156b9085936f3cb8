"""Real hosts without hardware: network namespaces, booted systemd, OpenSSH, fake GPUs.

`lab.Lab` is the way in. Tests only; nothing here is shipped.
"""
