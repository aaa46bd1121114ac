"""The only door to the stubs and to the options of grpc: conversion, errors as statuses, servers, channels."""
