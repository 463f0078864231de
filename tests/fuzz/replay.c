/* Gives files to the fuzzing target one by one, where there is no libFuzzer. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int count, char **names) {
    static uint8_t content[1 << 20];
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(names[i], "rb");
        if (!file) {
            perror(names[i]);
            return 1;
        }
        size_t size = fread(content, 1, sizeof content, file);
        fclose(file);
        LLVMFuzzerTestOneInput(content, size);
    }
    printf("%d inputs\n", count - 1);
    return 0;
}
