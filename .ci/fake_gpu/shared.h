/* How the fake libraries are told what to do, and the files that their processes share. */
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Read when it is needed: a notebook sets os.environ. */
static inline long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

/* The path of a shared file. Those who set FAKE_GPU to a folder of their own have a machine of their own. */
static inline const char *shared_path(char path[4096], const char *name) {
    const char *own = getenv("FAKE_GPU"), *temp = getenv("TMPDIR");
    char folder[3800];
    if (own && *own)
        snprintf(folder, sizeof folder, "%s", own);
    else
        snprintf(folder, sizeof folder, "%s/fake-gpu-%d", temp && *temp ? temp : "/tmp", getuid());
    mkdir(folder, 0700);
    snprintf(path, 4096, "%s/%s", folder, name);
    return path;
}

/* A shared file's memory; new memory is zero. */
static inline void *shared_memory(const char *name, size_t size) {
    char path[4096];
    int file = open(shared_path(path, name), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, size)) {
        perror(path);
        abort();
    }
    void *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return memory;
}
