#include "resize/boxes.h"

#include <math.h>
#include <stdbool.h>

/* Every operation is one of IEEE 754's and rounds as numpy's does, so that boxes are equal bit for
 * bit to those of the plain code. */

static double at_least_1(double x) { return x < 1 ? 1 : x; }
static double least(double a, double b) { return a < b ? a : b; }

/* The largest box that has such a ratio, centred: where no try fits. */
static void widest_box(double width, double height, const double ratio[2], double box[4]) {
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

static void central_box(const BoxRule *rule, const int64_t size[2], double box[4]) {
    double scales[2], resized[2];
    int64_t shorter = size[0] < size[1] ? size[0] : size[1];
    for (int axis = 0; axis < 2; axis++)
        scales[axis] = (double)size[axis] / (double)rule->covered[axis];
    for (int axis = 0; axis < 2; axis++) /* whole pixels: truncated for a square, else rounded */
        resized[axis] = rule->covered[0] == rule->covered[1]
                            ? (double)(size[axis] * rule->covered[axis] / shorter)
                            : rint((double)size[axis] / least(scales[0], scales[1]));
    for (int axis = 0; axis < 2; axis++) {
        double start = rint((resized[axis] - (double)rule->size[axis]) / 2);
        double step = (double)size[axis] / resized[axis], end = (double)size[axis];
        double low = start * step, high = (start + (double)rule->size[axis]) * step;
        box[axis] = low < 0 ? 0 : least(low, end); /* corrects rounding errors */
        box[axis + 2] = high < 0 ? 0 : least(high, end);
    }
}

void make_box(const BoxRule *rule, int64_t i, const int64_t size[2], double box[4]) {
    double width = (double)size[0], height = (double)size[1];
    if (rule->kind == CENTRAL)
        central_box(rule, size, box);
    else if (rule->kind == RANDOM && !drawn_box(width, height, rule->drawn[i], box))
        widest_box(width, height, rule->ratio, box);
}
