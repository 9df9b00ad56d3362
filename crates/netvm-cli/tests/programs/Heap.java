import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** Fills, replaces and reads a heap; what it prints tells whether anything in it was wrong. */
public class Heap {
    public static void main(String[] arguments) throws Exception {
        Map<Integer, byte[]> blocks = new HashMap<>();
        long seed = 42;
        for (int i = 0; i < 40_000; i++) {
            seed = seed * 6364136223846793005L + 1442695040888963407L;
            byte[] block = new byte[2000];
            new Random(seed).nextBytes(block);
            blocks.put((int) (seed >>> 40) % 15_000, block);
        }
        long[] sums = new long[2];
        Thread[] threads = new Thread[2];
        for (int t = 0; t < threads.length; t++) {
            final int part = t;
            threads[t] = new Thread(() -> {
                List<Integer> keys = new ArrayList<>(blocks.keySet());
                Collections.sort(keys);
                for (int key : keys) {
                    if ((key & 1) == part) {
                        sums[part] = sums[part] * 31 + Arrays.hashCode(blocks.get(key)) + key;
                    }
                }
            });
            threads[t].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        System.out.println(blocks.size() + " " + sums[0] + " " + sums[1]);
    }
}
