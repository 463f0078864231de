/* Random crops, of drawn numbers and an image's size: see RandomCropParameters in crops.py. */
#ifndef TRAINYARD_BOXES_H
#define TRAINYARD_BOXES_H

#include <stdint.h>

enum { TRIES = 10, DRAWN = 2 + 2 * TRIES };

/* Of `count` images of sizes[i] (width, height) the boxes (left, top, right, bottom). drawn[i] has
 * where it lies, across and down, in [0, 1), then of each try the share of the area, then of each
 * try the width over the height. */
void random_boxes(int64_t count, const int64_t (*sizes)[2], const double (*drawn)[DRAWN],
                  const double ratio[2], double (*boxes)[4]);

#endif
