#include "resize/boxes.h"

#include <math.h>
#include <stdbool.h>

/* Every operation is one of IEEE 754's and rounds as numpy's does, so that boxes are equal bit for
 * bit to those of the plain code. */

static double at_least_1(double x) { return x < 1 ? 1 : x; }
static double least(double a, double b) { return a < b ? a : b; }

/* The largest box that has such a ratio, centred: where no try fits. */
static void central_box(double width, double height, const double ratio[2], double box[4]) {
    double nearest = width / height;
    nearest = nearest < ratio[0] ? ratio[0] : least(nearest, ratio[1]);
    double wide = at_least_1(least(width, rint(height * nearest)));
    double high = at_least_1(least(height, rint(width / nearest)));
    box[0] = floor((width - wide) / 2);
    box[1] = floor((height - high) / 2);
    box[2] = box[0] + wide;
    box[3] = box[1] + high;
}

static bool drawn_box(double width, double height, const double drawn[DRAWN], double box[4]) {
    const double *shares = drawn + 2, *ratios = shares + TRIES;
    for (int i = 0; i < TRIES; i++) {
        double area = width * height * shares[i];
        double wide = rint(sqrt(area * ratios[i])), high = rint(sqrt(area / ratios[i]));
        if (wide >= 1 && wide <= width && high >= 1 && high <= height) {
            box[0] = floor(drawn[0] * (width - wide + 1));
            box[1] = floor(drawn[1] * (height - high + 1));
            box[2] = box[0] + wide;
            box[3] = box[1] + high;
            return true;
        }
    }
    return false;
}

void random_boxes(int64_t count, const int64_t (*sizes)[2], const double (*drawn)[DRAWN],
                  const double ratio[2], double (*boxes)[4]) {
    for (int64_t i = 0; i < count; i++) {
        double width = (double)sizes[i][0], height = (double)sizes[i][1];
        if (!drawn_box(width, height, drawn[i], boxes[i]))
            central_box(width, height, ratio, boxes[i]);
    }
}
