# A base for Dockerfile where rayproject/ray cannot be had: Debian 12 as debootstrap makes it, with
# Python 3.11 and the user `ray` (`make image`).
FROM scratch
ADD debian.tar /
RUN useradd --create-home --uid 1000 --gid users ray \
    && python3 -m venv /home/ray/venv && chown -R ray:users /home/ray
ENV PATH=/home/ray/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /home/ray
USER 1000
