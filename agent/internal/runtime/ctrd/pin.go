package ctrd

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

const (
	// pinLabel and its value keep an image from the kubelet's collection: containerd's CRI plugin tells the kubelet of it.
	pinLabel, pinValue = "io.cri-containerd.pinned", "pinned"
	// ownPinLabel says that it was we who pinned an image.
	ownPinLabel = "fast-sandbox.io/pinned"
)

// PinImages holds the pins against the containers of all agents on the node. The kubelet's collection comes every few
// minutes and spares what is young, so that a look now and then is enough, and a create need not wait for it.
func (r *Runtime) PinImages(ctx context.Context) error {
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
		_, ours := img.Labels[ownPinLabel]
		switch pinned := img.Labels[pinLabel] == pinValue; {
		case used[img.Name] && !pinned:
			errs = append(errs, r.setPin(ctx, img.Name, pinValue))
		case !used[img.Name] && ours:
			errs = append(errs, r.setPin(ctx, img.Name, ""))
		}
	}
	return errors.Join(errs...)
}

// setPin sets or, given no value, removes both labels. An image that is gone needs neither.
func (r *Runtime) setPin(ctx context.Context, name, value string) error {
	img := images.Image{Name: name, Labels: map[string]string{pinLabel: value, ownPinLabel: value}}
	_, err := r.client.ImageService().Update(ctx, img, "labels."+pinLabel, "labels."+ownPinLabel)
	if err == nil || errdefs.IsNotFound(err) {
		return nil
	}
	return classify(err, "pinning image %s", name)
}
