package follow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// pageSize is the number of objects of a page.
const pageSize = 5000

// form is a way to read lists.
type form struct {
	// accept is the media type of an answer.
	accept string
	// split calls item with each item of an answer, in a piece of memory of its own, and returns the metadata of the list.
	split func(source io.Reader, item func([]byte) error) (metav1.ListMeta, error)
	// decode decodes an item.
	decode func(item []byte) (*v1alpha1.Sandbox, error)
	// take receives what was decoded. Calls are concurrent.
	take func(*v1alpha1.Sandbox)
}

// objects is the form of whole objects.
func objects(take func(*v1alpha1.Sandbox)) form {
	return form{accept: "application/json", split: split, decode: decodeObject, take: take}
}

// outlines is the form of metadata.
func outlines(take func(*v1alpha1.Sandbox)) form {
	return form{
		accept: "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
		split:  splitMetadata, decode: decodeMetadata, take: take,
	}
}

// fill reads the objects that were outlined, once it may, and repeats that until it has.
func (f *Follower) fill(ctx context.Context) {
	for _, ready := range []<-chan struct{}{f.synced, f.config.Fill} {
		select {
		case <-ready:
		case <-ctx.Done():
			return
		}
	}
	log := logr.FromContextOrDiscard(ctx)
	options := metav1.ListOptions{ResourceVersion: f.version, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}
	err := backoff.Retry(ctx, f.config.Clock, backoff.Policy{Initial: time.Second, Max: time.Minute}, func(ctx context.Context) error {
		_, _, err := f.list(ctx, options, objects(f.config.Sink.Filled))
		if err != nil {
			log.Info("reading all sandboxes again", obs.KeyError, err.Error())
		}
		return err
	})
	if err == nil {
		close(f.filled)
		log.Info("read all sandboxes")
	}
}

// list reads all sandboxes, and returns their uids and the resource version of the list. If the API server could not make it within the
// time that it allows for a request, the list is made in pages.
func (f *Follower) list(ctx context.Context, options metav1.ListOptions, as form) (listed map[types.UID]struct{}, version string, err error) {
	listed, version, err = f.pages(ctx, options, as)
	if (errors.As(err, new(brokenOffError)) || apierrors.IsTimeout(err)) && ctx.Err() == nil {
		listed, version, err = f.pages(ctx, metav1.ListOptions{Limit: pageSize}, as)
	}
	return listed, version, err
}

// brokenOffError is the error of an answer that was not read to its end.
type brokenOffError struct{ error }

// Unwrap returns the reason.
func (b brokenOffError) Unwrap() error { return b.error }

// pages reads one list, which may have several pages.
func (f *Follower) pages(ctx context.Context, options metav1.ListOptions, as form) (map[types.UID]struct{}, string, error) {
	items := make(chan []byte, 64)
	decoding, decode := errgroup.WithContext(ctx)
	listed := map[types.UID]struct{}{}
	var mu sync.Mutex
	for range runtime.GOMAXPROCS(0) {
		decoding.Go(func() error {
			uids, err := as.decodeAll(items)
			mu.Lock()
			defer mu.Unlock()
			for _, uid := range uids {
				listed[uid] = struct{}{}
			}
			return err
		})
	}
	var meta metav1.ListMeta
	var err error
	for more := true; more && err == nil; more = meta.Continue != "" {
		meta, err = f.page(ctx, options, as, func(item []byte) error {
			select {
			case items <- item:
				return nil
			case <-decode.Done():
				return decode.Err()
			}
		})
		options.Continue, options.ResourceVersion, options.ResourceVersionMatch = meta.Continue, "", ""
	}
	close(items)
	if err := errors.Join(decoding.Wait(), err); err != nil {
		return nil, "", err
	}
	return listed, meta.ResourceVersion, nil
}

// page reads one answer. It is not compressed, which would cost more than it saves.
func (f *Follower) page(ctx context.Context, options metav1.ListOptions, as form, item func([]byte) error) (metav1.ListMeta, error) {
	body, err := f.client.Get().Resource("sandboxes").VersionedParams(&options, f.params).
		SetHeader("Accept", as.accept).SetHeader("Accept-Encoding", "identity").Stream(ctx)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	defer func() { _ = body.Close() }()
	meta, err := as.split(body, item)
	if err != nil {
		return metav1.ListMeta{}, brokenOffError{fmt.Errorf("reading a list: %w", err)}
	}
	return meta, nil
}

// decodeAll decodes items, and returns their uids.
func (as form) decodeAll(items <-chan []byte) ([]types.UID, error) {
	var uids []types.UID
	for item := range items {
		sb, err := as.decode(item)
		if err != nil {
			return nil, fmt.Errorf("decoding a sandbox: %w", err)
		}
		as.take(sb)
		uids = append(uids, sb.UID)
	}
	return uids, nil
}

func decodeObject(item []byte) (*v1alpha1.Sandbox, error) {
	item, err := strip(item)
	if err != nil {
		return nil, err
	}
	sb := &v1alpha1.Sandbox{}
	return sb, json.Unmarshal(item, sb)
}
