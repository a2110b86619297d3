package ctrd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

const (
	// pinLabel with pinValue protects an image from the kubelet's image garbage collection: containerd's CRI plugin reports
	// it to the kubelet.
	pinLabel, pinValue = "io.cri-containerd.pinned", "pinned"
	// ownPinLabel marks an image that an agent has pinned.
	ownPinLabel = "fast-sandbox.io/pinned"
	// listedPrefix, with an agent's uid, is the key of the time until which the agent lists the image (RFC 3339). Agents on
	// one node share its images but not their lists; a time that has passed is that of an agent that is gone.
	listedPrefix = "fast-sandbox.io/pinned-until."
	// A time is renewed when less than half of listedFor is left.
	listedFor = 10 * time.Minute
)

// PinImages compares the pins with the containers and the lists of all agents on the node. The kubelet's collection runs
// every few minutes and spares images that are young, so a create need not wait for its image to be pinned.
func (r *imageStore) PinImages(ctx context.Context, listed []string) error {
	containers, err := r.client.ContainerService().List(ctx, fmt.Sprintf("labels.%q==true", identity.KeyManaged))
	if err != nil {
		return classify(err, "listing containers")
	}
	used := map[string]bool{}
	for _, c := range containers {
		used[c.Image] = true
	}
	list, err := r.client.ImageService().List(ctx)
	if err != nil {
		return classify(err, "listing images")
	}
	var errs []error
	for _, img := range list {
		change := pinChange(img.Labels, used[img.Name], slices.Contains(listed, img.Name), r.config.PodUID, r.config.Clock.Now())
		errs = append(errs, r.setLabels(ctx, img.Name, change))
	}
	return errors.Join(errs...)
}

// pinChange returns the labels of an image that have to change, an empty value for one to remove, given whether a container
// uses it and whether the agent lists it.
func pinChange(labels map[string]string, used, listed bool, agent string, now time.Time) map[string]string {
	change := map[string]string{}
	own := listedPrefix + agent
	if until, ok := labels[own]; listed && until < stamp(now.Add(listedFor/2)) {
		change[own] = stamp(now.Add(listedFor))
	} else if ok && !listed {
		change[own] = ""
	}
	wanted := used || listed
	for key, until := range labels {
		switch {
		case !strings.HasPrefix(key, listedPrefix) || key == own:
		case until < stamp(now):
			change[key] = ""
		default:
			wanted = true
		}
	}
	_, ours := labels[ownPinLabel]
	switch pinned := labels[pinLabel] == pinValue; {
	case wanted && !pinned:
		change[pinLabel], change[ownPinLabel] = pinValue, pinValue
	case !wanted && ours:
		change[pinLabel], change[ownPinLabel] = "", ""
	}
	return change
}

// stamp formats a time such that stamps compare as their times do.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// setLabels sets labels of an image, or removes those without a value. An image that is gone needs neither.
func (r *imageStore) setLabels(ctx context.Context, name string, labels map[string]string) error {
	if len(labels) == 0 {
		return nil
	}
	var paths []string
	for key := range labels {
		paths = append(paths, "labels."+key)
	}
	slices.Sort(paths)
	_, err := r.client.ImageService().Update(ctx, images.Image{Name: name, Labels: labels}, paths...)
	if err == nil || errdefs.IsNotFound(err) {
		return nil
	}
	return classify(err, "pinning image %s", name)
}
