"""Processes that share, inherit and send data, however they are started."""
import hashlib
import multiprocessing
import random
from multiprocessing import shared_memory


def digest(parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()


def sort(seed):
    numbers = random.Random(seed)
    return digest(sorted(numbers.randbytes(1000) for _ in range(4000)))


def child(base, number, queue):
    queue.put((number, digest(base[number::4])))


def main():
    base = [random.Random(i).randbytes(3000) for i in range(4000)]
    for method in ["fork", "forkserver", "spawn"]:
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            print(method, pool.map(sort, range(2)))
        queue = context.Queue()
        children = [context.Process(target=child, args=(base, i, queue)) for i in range(2)]
        for process in children:
            process.start()
        print(sorted(queue.get() for _ in children))
        for process in children:
            process.join()
    shared = shared_memory.SharedMemory(create=True, size=8 << 20)
    shared.buf[: 8 << 20] = random.Random(9).randbytes(8 << 20)
    print(hashlib.sha256(shared.buf[: 8 << 20]).hexdigest())
    shared.close()
    shared.unlink()


if __name__ == "__main__":
    main()
